"""Lowers one step of tpu-inference, vLLM's JAX back end for TPUs, on abstract weights and caches.

The engine's own code makes the mesh with its device order, the token buckets, the model, the shapes and
shardings of weights and caches, the sampler and the compiler options. This module stands for what a
server does around them. It was read in releases 0.24 and 0.32, and inspects what differs among them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_inference import utils
from tpu_inference.distributed import jax_parallel_state
from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.common.sharding import ShardingAxisName, ShardingConfigManager
from tpu_inference.layers.jax.sample.sampling import sample
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata
from tpu_inference.models.common import model_loader
from tpu_inference.runner import kv_cache, tpu_runner
from tpu_inference.runner import utils as runner_utils

from meshscope.events.enums import Part, Phase
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.model.mechanisms.grouped import grouped_of
from meshscope.model.mechanisms.latent import latent_of
from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.abstract import abstract_model, engine_step, known_options
from meshscope.programs.engines.engine_config import QUANTIZATION, vllm_config
from meshscope.programs.engines.loading import process_loaded
from meshscope.programs.frontends import LOGITS, MODEL, SAMPLE, SELECT, StepPrograms

DTYPES: dict[str, Any] = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
LANES = 128


def build_step(experiment: Experiment, phase: Phase, devices: list[Any]) -> StepPrograms:
    """The programs of one step: the model, the selection of rows, the logits and the sampler."""
    jax.devices = lambda *_, **__: devices  # tables of block sizes read the kind of chip there
    jax_parallel_state.init_pp_distributed_environment("", 0, 1, devices[0], need_pp=False)
    runner = _runner(experiment, devices)
    with jax.set_mesh(runner.mesh):
        functions = _StepBuilder(experiment=experiment, phase=phase, runner=runner).functions()
    _, leaves, caches, *_ = functions[MODEL]
    return engine_step(functions, runner.mesh, (leaves, caches))


def _runner(experiment: Experiment, devices: list[Any]) -> Any:
    """The engine's model runner with mesh and buckets, without weights, caches and requests."""
    config = vllm_config(experiment, DTYPES[experiment.workload.activation_dtype])
    config.sharding_config = ShardingConfigManager.from_vllm_config(config)
    config.cache_config.block_size = _page_size(config)
    runner = tpu_runner.TPUModelRunner.__new__(tpu_runner.TPUModelRunner)
    runner.vllm_config = config
    for name in ("model", "cache", "parallel", "scheduler", "speculative", "lora", "load"):
        setattr(runner, f"{name}_config", getattr(config, f"{name}_config"))
    runner.devices, runner.rank = devices, 0
    runner.dtype = config.model_config.dtype
    runner.dp_size = config.sharding_config.total_dp_size
    runner._init_mesh()
    tpu_runner.InputBatch = lambda **_: None  # torch tensors of requests
    runner._init_inputs()
    return runner


def _page_size(config: Any) -> int:
    """Tokens of a page of the cache, as the engine's platform chooses them."""
    backends = "tpu_inference.layers.vllm.backends"
    if config.model_config.use_mla:
        module = import_module(f"{backends}.flash_attn_mla")
        return module.PallasMLAttentionBackend.get_page_size(config)
    backend = import_module(f"{backends}.flash_attn").PallasAttentionBackend
    return max(backend.get_page_size(config), backend.get_min_page_size(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepBuilder:
    """Builds the functions of one step with their abstract arguments."""

    experiment: Experiment
    phase: Phase
    runner: Any

    def functions(self) -> dict[str, tuple[Any, ...]]:
        """Each function followed by its arguments, in the order of a step."""
        merged, leaves = self._abstract_model()

        def step(leaves: Any, caches: Any, token_ids: Any, metadata: Any) -> Any:
            with jax.named_scope(self.phase.value):
                caches, hidden, *others = merged(leaves)(caches, token_ids, metadata)
            return caches, hidden, others

        def logits(leaves: Any, hidden: Any) -> Any:
            with jax.named_scope(self.phase.value), jax.named_scope(Part.LM_HEAD.value):
                return merged(leaves).compute_logits(hidden)

        rows = self._sharding(ShardingAxisName.ATTN_DATA, None)
        vocabulary = self._sharding(ShardingAxisName.MLP_DATA, ShardingAxisName.MLP_TENSOR)
        caches, width = self._caches(), self.experiment.model.hidden
        model = jax.jit(
            step,
            out_shardings=([cache.sharding for cache in caches], rows, None),
            donate_argnums=1,
            compiler_options=_compiler_options("get_step_fn_compiler_options"),
        )
        hidden = _array((self._n_tokens, width), self.runner.dtype, rows)
        selected = _array((self._n_requests, width), self.runner.dtype, rows)
        scores = jax.eval_shape(logits, leaves, selected)
        return {
            MODEL: (model, leaves, caches, *self._inputs()),
            SELECT: (self._selection(), hidden, self._integers(self._n_requests)),
            LOGITS: (jax.jit(logits, out_shardings=vocabulary), leaves, selected),
            SAMPLE: self._sampler(_array(scores.shape, scores.dtype, vocabulary)),
        }

    def _abstract_model(self) -> tuple[Callable[[Any], Any], Any]:
        """A function that merges leaves into the model with scopes, and abstract leaves."""
        config, mesh = self.runner.vllm_config, self.runner.mesh
        model, workload = self.experiment.model, self.experiment.workload
        # gpt-oss keeps its checkpoint's weights.
        has_experts = model.moe is not None and model.family.traits.experts != "gpt_oss"
        is_processed = has_experts or workload.weight_dtype in QUANTIZATION
        kind = model_loader._get_model_architecture(config.model_config.hf_config)
        if (quantization := getattr(model_loader, "get_tpu_quantization_config", None)) is not None:
            config.quant_config = quantization(config)

        def loaded() -> Any:
            model = kind(config, jax.random.key(0), mesh)
            initialize = getattr(getattr(model, "model", None), "initialize_cache", None)
            if initialize is not None:  # the engine calls it after loading weights
                initialize()
            if is_processed:
                process_loaded(model, mesh)
            return model

        def leaf(array: Any, spec: Any) -> Any:
            """A weight with its sharding; without one, or for a scalar, it is replicated."""
            is_fit = isinstance(spec, P) and len(spec) <= array.ndim
            return _array(array.shape, array.dtype, self._sharding(*(spec if is_fit else ())))

        def placed(state: Any) -> Any:
            specs = nnx.get_partition_spec(state)
            return jax.tree.map(
                leaf, state, specs, is_leaf=lambda value: isinstance(value, jax.ShapeDtypeStruct)
            )

        options = known_options(nnx.eval_shape, graph_updates=False)
        return abstract_model(nnx.eval_shape(loaded, **options), placed)

    def _caches(self) -> list[Any]:
        """The paged caches of all layers, with the engine's shape and sharding."""
        model, runner = self.experiment.model, self.runner
        is_latent = model.attention.mechanism is Mechanism.LATENT
        # Heads of the cache and their size, padded as the engine's cache manager pads them.
        if is_latent:
            latent = latent_of(model.attention)
            n_heads = 1
            head_dim = sum(-(n // -LANES) * LANES for n in (latent.kv_rank, latent.rope_dim))
        else:
            heads = grouped_of(model.attention)
            n_heads = utils.get_padded_num_heads(heads.n_kv_heads, runner.mesh.shape["model"])
            head_dim = utils.get_padded_head_dim(heads.head_dim)
        n_pages = self.experiment.workload.batch * runner.max_num_blocks_per_req
        name = runner.cache_config.cache_dtype
        dtype = runner.dtype if name == "auto" else utils.get_jax_dtype_from_str_dtype(name)
        size = (n_pages, runner.block_size, n_heads, head_dim)
        shardings: list[Any] = []

        def recorded(*spec: Any) -> NamedSharding:
            shardings.append(NamedSharding(*spec))
            return shardings[-1]

        kv_cache.NamedSharding = recorded
        (cache,) = jax.eval_shape(
            lambda: kv_cache.create_kv_caches(
                *size, runner.mesh, ["layer"], dtype, **({"use_mla": True} if is_latent else {})
            )
        )
        return [_array(cache.shape, cache.dtype, shardings[-1])] * model.n_layers

    def _inputs(self) -> tuple[Any, Any]:
        """Token ids and attention metadata; the latter has other fields in each release."""
        runner = self.runner
        n_sequences = getattr(runner, "attn_max_num_seqs", runner.max_num_reqs)
        arrays = {
            "input_positions": self._integers(self._n_tokens),
            "block_tables": self._integers(runner.max_num_reqs * runner.max_num_blocks_per_req),
            "seq_lens": self._integers(n_sequences),
            "query_start_loc": self._integers(n_sequences + runner.dp_size),
            "request_distribution": self._integers(3 * runner.dp_size),
            "padded_num_reqs": runner.max_num_reqs,
        }
        known = {field.name for field in fields(AttentionMetadata) if field.init}
        metadata = AttentionMetadata(**{k: v for k, v in arrays.items() if k in known})
        return self._integers(self._n_tokens), metadata

    def _selection(self) -> Any:
        """The selection of each sequence's last row; its signature differs among the releases."""
        select = type(self.runner)._select_from_array_fn
        if known_options(select, mesh=None):
            return jax.jit(lambda array, rows: select(array, rows, self.runner.mesh))
        return jax.jit(lambda array, rows: select(self.runner, array, rows))

    def _sampler(self, logits: Any) -> tuple[Any, ...]:
        metadata = TPUSupportedSamplingMetadata(do_sampling=False)
        function = inspect.unwrap(sample)

        def greedy(logits: Any) -> Any:
            with jax.named_scope(self.phase.value), jax.named_scope(Part.SAMPLE.value):
                return function(jax.random.key(0), self.runner.mesh, logits, metadata)

        options = _compiler_options("get_sampling_compiler_options")
        return jax.jit(greedy, compiler_options=options), logits

    @property
    def _n_tokens(self) -> int:
        """The token bucket of a step, over all data-parallel ranks."""
        experiment = self.experiment
        n_each = experiment.n_sequences(self.phase) * experiment.n_positions(self.phase)
        n_all = n_each * experiment.plan.data_size
        return runner_utils.get_padded_token_len(self.runner.num_tokens_paddings, n_all)

    @property
    def _n_requests(self) -> int:
        """The bucket of sequences whose logits a step computes, over all data-parallel ranks."""
        experiment = self.experiment
        n_all = experiment.n_sequences(self.phase) * experiment.plan.data_size
        return next(n for n in self.runner.num_reqs_paddings if n >= n_all)

    def _sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.runner.mesh, P(*spec))

    def _integers(self, size: int) -> Any:
        """A list over data-parallel ranks."""
        return _array((size,), jnp.int32, self._sharding(ShardingAxisName.ATTN_DATA))


def _array(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _compiler_options(name: str) -> dict[str, str] | None:
    """The engine's compiler options for a program; None in releases without any."""
    try:
        module = import_module("tpu_inference.models.common.compiler_options")
    except ModuleNotFoundError:
        return None
    make = getattr(module, name, None)
    return None if make is None else make()
