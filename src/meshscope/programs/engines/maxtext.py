"""The programs of MaxText: prefill of one prompt, and a step of decoding (`MaxEngine`).

MaxText's own code builds the model, its caches and their shardings from its own configuration files.
Weights, caches and random states are abstract here. It was read in release 0.2.5.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext
from flax import nnx, struct
from flax.core.spmd import logical_axis_rules
from jax.sharding import NamedSharding, PartitionSpec
from maxtext.common.common_types import MODEL_MODE_AUTOREGRESSIVE
from maxtext.configs import pyconfig
from maxtext.inference.maxengine import maxengine
from maxtext.utils import maxtext_utils, sharding

from meshscope.errors import SpecError
from meshscope.events.enums import Phase
from meshscope.model.mechanisms.attention import Mechanism
from meshscope.plans.experiment import Experiment
from meshscope.programs.engines.abstract import engine_step
from meshscope.programs.engines.engine_config import MAXTEXT, maxtext_model, sizes_of
from meshscope.programs.frontends import MODEL, StepPrograms


@struct.dataclass
class ResultTokens:
    """JetStream's result of a step; MaxText returns its arrays."""

    data: Any
    log_prob: Any
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)


def build_step(experiment: Experiment, phase: Phase, devices: list[Any]) -> StepPrograms:
    """The program of one step: the model, the logits and the sampler are one in MaxText."""
    config = configuration(experiment, devices)
    builder = _StepBuilder(experiment=experiment, config=config, devices=devices)
    function = builder.prefill() if phase is Phase.PREFILL else builder.decode()
    resident = (builder.params, builder.cache)
    return engine_step({MODEL: function}, builder.engine.mesh, resident, without_mesh=(MODEL,))


class _StepBuilder:
    """The engine with abstract weights and caches, and its functions."""

    def __init__(self, *, experiment: Experiment, config: Any, devices: list[Any]) -> None:
        self._experiment = experiment
        self._config = config
        maxengine.engine_api.ResultTokens = ResultTokens
        self.engine = engine = maxengine.MaxEngine(config, devices)
        _, params, _, rest = nnx.split(engine.model, nnx.Param, nnx.Cache, ...)
        with logical_axis_rules(config.logical_axis_rules):
            shardings = sharding.nnx_construct_named_sharding(params, engine.mesh)
        self.params = jax.tree.map(_placed, params, shardings)
        self._rest = jax.tree.map(lambda a: self._replicated(a.shape, a.dtype), rest)
        annotations = maxtext_utils.get_kv_cache_annotations_nnx(
            engine.model_ar, config, engine.mesh
        )
        engine.kv_cache_shardings = jax.tree.map(
            lambda spec: NamedSharding(engine.mesh, spec), annotations
        )
        cache = nnx.to_pure_dict(engine._nnx_cache_state_template(MODEL_MODE_AUTOREGRESSIVE))
        self.cache = jax.tree.map(_placed, cache, engine.kv_cache_shardings)

    def prefill(self) -> tuple[Any, ...]:
        prefill = self._unwrapped("_prefill_jit")

        def step(params: Any, rest: Any, tokens: Any, length: Any, key: Any) -> Any:
            self.engine._nnx_rest_state = rest  # set by its load_params
            return prefill(
                self.engine, params=params, padded_tokens=tokens, true_length=length, rng=key
            )

        n_tokens = self._experiment.workload.prompt
        tokens, length = self._replicated((n_tokens,)), self._replicated(())
        return jax.jit(step), self.params, self._rest, tokens, length, self._key

    def decode(self) -> tuple[Any, ...]:
        generate = self._unwrapped("_generate_jit")

        def step(params: Any, rest: Any, state: Any, key: Any) -> Any:
            self.engine._nnx_rest_state = rest  # set by its load_params
            return generate(self.engine, params, state, rng=key)

        n_sequences = self._experiment.workload.batch
        column = (n_sequences, 1)
        state = {
            "logits": self._replicated((*column, self._config.vocab_size), jnp.float32),
            "cache": self.cache,
            "next_pos": self._replicated(column),
            "generated_tokens": self._replicated(column),
            "tokens": self._replicated(column),
            "token_logp": self._replicated(column, jnp.float32),
        }
        return jax.jit(step, donate_argnums=2), self.params, self._rest, state, self._key

    def _unwrapped(self, name: str) -> Callable[..., Any]:
        """A jitted method, to be jitted with random states among its arguments."""
        return getattr(maxengine.MaxEngine, name).__wrapped__

    @property
    def _key(self) -> Any:
        return jax.eval_shape(lambda: jax.random.PRNGKey(0))

    def _replicated(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        whole = NamedSharding(self.engine.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)


def _placed(array: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


CONFIGS = Path(*maxtext.__path__) / "configs"


def configuration(experiment: Experiment, devices: list[Any]) -> Any:
    """MaxText's configuration of an experiment; SpecError if its model has other sizes.

    MaxText's own settings for inference come first.
    """
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as MaxText's scripts set it
    jax.devices = lambda *_, **__: devices  # MaxText counts them for the batch and the mesh
    jax.device_count = lambda *_, **__: len(devices)
    model, workload = experiment.model, experiment.workload
    settings = {
        **MAXTEXT["settings"],
        "model_name": maxtext_model(model),
        "base_num_decoder_layers": model.n_layers,
        "dtype": MAXTEXT["dtypes"][workload.activation_dtype],
        "weight_dtype": MAXTEXT["dtypes"][workload.weight_dtype],
        "ici_tensor_parallelism": experiment.plan.tp,
        "per_device_batch_size": workload.batch / len(devices),
        "max_prefill_predict_length": workload.prompt,
        "max_target_length": workload.context,
    }
    if model.moe is not None:
        settings |= MAXTEXT["settings_of_experts"]
    if model.attention.mechanism is Mechanism.LATENT:
        settings |= MAXTEXT["settings_of_latent_attention"]
    texts = [f"{name}={value}" for name, value in settings.items()]
    flags = os.environ.get("XLA_FLAGS", "")
    config = pyconfig.initialize(
        ["meshscope", str(CONFIGS / "inference" / "inference.yml"), *texts]
    )
    os.environ["XLA_FLAGS"] = flags  # without the folder for dumps that MaxText adds
    jax.config.update("jax_use_shardy_partitioner", config.shardy)
    for name, size in sizes_of(model).items():
        if (configured := getattr(config, name)) != size:
            raise SpecError(
                f"{model.name}: MaxText's {config.model_name} has {name}={configured} instead of {size}. Use "
                "--frontend jax, or a model of MaxText's sizes."
            )
    return config
