"""Lowers one step of SGLang-JAX on abstract weights and caches.

The engine's own code makes the mesh with its device order, the model, the shapes and shardings of weights,
the cache and its pages, the metadata of a batch and the sampler. This module stands for what a server does
around them: it makes a batch of the size of a bucket, and puts arrays on no device. It was read in release
0.0.2 and in sources of January and August 2026, and inspects what differs among them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.configs.model_config import ModelConfig
from sgl_jax.srt.layers import logits_processor
from sgl_jax.srt.layers.attention import flashattention_backend
from sgl_jax.srt.layers.sampler import Sampler
from sgl_jax.srt.mem_cache import memory_pool
from sgl_jax.srt.model_executor import forward_batch_info
from sgl_jax.srt.models.registry import ModelRegistry
from sgl_jax.srt.sampling import sampling_batch_info
from sgl_jax.srt.utils import common_utils, mesh_utils

from meshscope.events.enums import Part, Phase
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.abstract import abstract_model, engine_step, known_options
from meshscope.programs.engines.engine_config import architecture_config
from meshscope.programs.frontends import MODEL, SAMPLE, StepPrograms

PAGE_SIZE = 128  # tokens; of the engine's own benchmarks (test/srt/nightly), where the default is 1
MOE_BACKEND = "epmoe"  # the default of its servers
LANES = 128  # of a vector register: the cache pads heads to them
# Modules that put arrays of the host on devices.
_PLACING = (flashattention_backend, forward_batch_info, logits_processor, sampling_batch_info)


def build_step(experiment: Experiment, phase: Phase, devices: list[Any]) -> StepPrograms:
    """The programs of one step: the model with its logits, and the sampler."""
    jax.devices = lambda *_, **__: devices  # the mesh and tables of block sizes ask for them
    jax.local_devices = lambda *_, **__: devices
    for module in _PLACING:
        module.device_array = _abstract
    # Data, tensor and, in 0.0.2, expert, which the engine's servers leave at 1.
    axes = getattr(mesh_utils, "default_mesh_axes", None) or mesh_utils.mesh_axes
    sizes = [experiment.plan.dp, experiment.plan.tp, 1][: len(axes)]
    mesh = mesh_utils.create_device_mesh(sizes, [1] * len(axes), devices=devices)
    with jax.set_mesh(mesh):
        functions = _StepBuilder(experiment=experiment, phase=phase, mesh=mesh).functions()
    _, leaves, _, pools, _ = functions[MODEL]
    # the engine samples without a mesh
    return engine_step(functions, mesh, (leaves, pools), without_mesh=(SAMPLE,))


def _abstract(data: Any, sharding: Any = None, **_: Any) -> Any:
    """Abstract arrays with the shapes of arrays on devices."""

    def one(value: Any) -> Any:
        value = np.asarray(value)
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        return jax.ShapeDtypeStruct(value.shape, dtype, sharding=sharding)

    return jax.tree.map(one, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepBuilder:
    """Builds the functions of one step with their abstract arguments."""

    experiment: Experiment
    phase: Phase
    mesh: Any

    def functions(self) -> dict[str, tuple[Any, ...]]:
        """Each function followed by its arguments, in the order of a step."""
        config = self._config()
        merged, leaves = self._abstract_model(config)
        batch = self._batch()
        backend = flashattention_backend.FlashAttention(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            page_size=PAGE_SIZE,
            mesh=self.mesh,
        )
        backend.forward_metadata = nnx.data(backend.get_forward_metadata(self._batch()))
        runner = SimpleNamespace(
            mesh=self.mesh,
            attn_backend=backend,
            model_config=SimpleNamespace(hf_config=config, is_embedding=False),
        )
        forward = forward_batch_info.ForwardBatch.init_new(batch, runner)
        metadata = logits_processor.LogitsMetadata.from_model_worker_batch(batch, self.mesh)
        pools = self._pools(config)

        def step(leaves: Any, forward: Any, pools: Any, metadata: Any) -> Any:
            with jax.named_scope(self.phase.value):
                return merged(leaves)(forward, pools, metadata)

        model = jax.jit(step, donate_argnums=2)
        output = jax.eval_shape(step, leaves, forward, pools, metadata)[0]
        return {
            MODEL: (model, leaves, forward, pools, metadata),
            SAMPLE: self._sampler(output, batch, config.vocab_size),
        }

    def _config(self) -> Any:
        """The model's config as the engine changes it for a plan; it refuses some plans here."""
        plan = self.experiment.plan
        config = SimpleNamespace(**architecture_config(self.experiment.model))
        config.ep_size, config.moe_backend = plan.ep, MOE_BACKEND
        known = ModelConfig.__new__(ModelConfig)  # its __init__ reads a checkpoint
        known.hf_config = known.hf_text_config = config
        known.num_attention_heads = config.num_attention_heads
        known.num_key_value_heads = config.num_key_value_heads
        known.validate_tensor_parallel_config(plan.tp)
        known.configure_for_tensor_parallel(plan.tp)
        return config

    def _abstract_model(self, config: Any) -> tuple[Callable[[Any], Any], Any]:
        """A function that merges leaves into the model with scopes, and abstract leaves."""
        kind, _ = ModelRegistry.resolve_model_cls(config.architectures)

        def made() -> Any:
            rngs = known_options(kind.__init__, rngs=nnx.Rngs(0))
            return kind(config, dtype=jnp.bfloat16, mesh=self.mesh, **rngs)

        return abstract_model(nnx.eval_shape(made), self._placed)

    def _leaf(self, leaf: Any) -> Any:
        """An array with its sharding over the mesh, or over the expert mesh with the same devices."""
        spec = getattr(leaf.sharding, "spec", P())
        mesh = getattr(leaf.sharding, "mesh", None)
        if mesh is None or mesh.empty or mesh.axis_names == self.mesh.axis_names:
            mesh = self.mesh
        else:
            devices = self.mesh.devices.reshape(mesh.axis_sizes)
            mesh = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def _pools(self, config: Any) -> Any:
        assert self.experiment.model.attention.mechanism is Mechanism.GROUPED
        kind = memory_pool.MHATokenToKVPool
        memory_pool.jax = _WithoutAllocation()
        pool = kind(
            size=self._n_cached,
            page_size=PAGE_SIZE,
            dtype=jnp.bfloat16,
            head_num=config.num_key_value_heads,
            head_dim=-(-config.head_dim // LANES) * LANES,
            layer_num=config.num_hidden_layers,
            mesh=self.mesh,
            **known_options(kind.__init__, dp_size=self.experiment.plan.dp),
        )
        memory_pool.jax = jax
        if (pools := getattr(memory_pool, "MemoryPools", None)) is None:
            return pool
        return pools(token_to_kv_pool=pool)

    def _batch(self) -> Any:
        """A batch of the bucket's size; attributes that a release reads and this lacks are None."""
        modes = forward_batch_info.ForwardMode
        is_decode = self.phase is Phase.DECODE
        n_requests, n_tokens = self._n_requests, self._n_tokens
        ones = np.ones(n_requests, np.int32)
        # A list in 0.0.2, a column in releases that know the size of the vocabulary.
        read = sampling_batch_info.SamplingMetadata.from_model_worker_batch
        temperatures_shape = (n_requests, *(1 for _ in known_options(read, vocab_size=0)))
        values: dict[str, Any] = {
            "bid": 1,
            "forward_mode": modes.DECODE if is_decode else modes.EXTEND,
            "input_ids": np.zeros(n_tokens, np.int32),
            "positions": np.zeros(n_tokens, np.int32),
            "out_cache_loc": np.zeros(n_tokens, np.int32),
            "cache_loc": np.zeros(self._n_cached, np.int32),
            "seq_lens": ones,
            "req_pool_indices": ones,
            "extend_prefix_lens": None if is_decode else ones,
            "extend_seq_lens": None if is_decode else ones,
            "logits_indices": None if is_decode else ones,
            "return_logprob": False,
            "dp_size": self.experiment.plan.dp,
            "per_dp_bs_size": n_requests // self.experiment.plan.dp,
            "capture_hidden_mode": forward_batch_info.CaptureHiddenMode.NULL,
            "apply_for_deepstack": False,
            "sampling_info": _Batch(
                temperatures=np.ones(temperatures_shape, np.float32),
                top_ps=np.ones(n_requests, np.float32),
                top_ks=ones,
                min_ps=np.zeros(n_requests, np.float32),
                is_all_greedy=True,
                need_min_p_sampling=False,
            ),
        }
        return _Batch(**values)

    def _sampler(self, output: Any, batch: Any, n_vocab: int) -> tuple[Any, ...]:
        read = sampling_batch_info.SamplingMetadata.from_model_worker_batch
        metadata = read(batch, mesh=self.mesh, **known_options(read, vocab_size=n_vocab))
        options = known_options(Sampler.__call__, use_sort_for_toppk_minp=False)
        positions = _abstract(batch.positions, NamedSharding(self.mesh, P()))
        inputs = known_options(Sampler.__call__, positions=positions)
        leaves, treedef = jax.tree.flatten(metadata)
        is_array = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
        arrays = [leaf for leaf, is_one in zip(leaves, is_array, strict=True) if is_one]

        def greedy(output: Any, arrays: Any, inputs: Any) -> Any:
            rest = iter(arrays)
            every = [
                next(rest) if one else leaf for leaf, one in zip(leaves, is_array, strict=True)
            ]
            sampler = Sampler(nnx.Rngs(0), **known_options(Sampler.__init__, mesh=self.mesh))
            with jax.named_scope(self.phase.value), jax.named_scope(Part.SAMPLE.value):
                return sampler(output, treedef.unflatten(every), **inputs, **options)

        return jax.jit(greedy), self._placed(output), arrays, inputs

    def _placed(self, tree: Any) -> Any:
        """The model's state or output with its sharding over the mesh."""
        return jax.tree.map(self._leaf, tree)

    @property
    def _n_requests(self) -> int:
        """The bucket of sequences; prefill always takes the largest."""
        experiment = self.experiment
        n_all = experiment.workload.batch
        buckets = sorted({*common_utils.PRECOMPILE_DEFAULT_BS_PADDINGS, n_all})
        return next(n for n in buckets if n >= n_all) if self.phase is Phase.DECODE else n_all

    @property
    def _n_tokens(self) -> int:
        """The token bucket of a step, over all data-parallel ranks."""
        if self.phase is Phase.DECODE:
            return self._n_requests
        experiment = self.experiment
        n_each = experiment.n_sequences(self.phase) * experiment.n_positions(self.phase)
        n_all = n_each * experiment.plan.data_size
        paddings = (n * experiment.plan.dp for n in common_utils.PRECOMPILE_DEFAULT_TOKEN_PADDINGS)
        return min((n for n in paddings if n >= max(n_all, self._n_requests)), default=n_all)

    @property
    def _n_cached(self) -> int:
        """Tokens of the cache: whole pages for the context of every sequence."""
        workload = self.experiment.workload
        return workload.batch * -(-workload.context // PAGE_SIZE) * PAGE_SIZE


class _WithoutAllocation:
    """JAX, whose jitted functions return abstract arrays; for functions without arguments."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def jit(self, function: Callable[[], Any], *, out_shardings: Any) -> Callable[[], Any]:
        shape = jax.eval_shape(function)
        return lambda: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=out_shardings)


class _Batch(SimpleNamespace):
    """A namespace whose other attributes are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
