"""How a plan starts in a server: each flag with its source, and what the server cannot express."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshscope.cost.predicted import with_default_chunk
from meshscope.model.stored_format import weight_dtype_of
from meshscope.plans.experiment import Experiment
from meshscope.plans.placement import order_text
from meshscope.units import format_dtype

VLLM = "vllm-project/tpu-inference@b8692ff01"
SGLANG = "sgl-project/sglang-jax@cddbf6f1 python/sgl_jax/srt/server_args.py"
MAXTEXT = "AI-Hypercomputer/maxtext@e591f30cb src/maxtext/configs/base.yml"
OWN = "meshscope predict --help"
VLLM_SERVE = "docs.vllm.ai, vllm serve"

_FP8 = {"f8e4m3fn": "fp8_e4m3", "f8e5m2": "fp8_e5m2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlag:
    """A flag with its value, and the public file that defines or uses it."""

    words: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command that starts a server with a plan; `not_expressed` are the parts it has no flag for."""

    server: str
    command: str
    flags: tuple[LaunchFlag, ...]
    not_expressed: tuple[str, ...]


_PLACEMENT = "the placement on the torus: no flag orders the devices of the mesh"
_Flags = Iterator[LaunchFlag | str]  # a string is something that the server cannot express


def launches_of(experiment: Experiment, n_layers: int | None = None) -> tuple[Launch, ...]:
    """The launch of an experiment in every known server; `n_layers` is set for a truncated model."""
    model = shlex.quote(experiment.model.name)
    override = json.dumps({"num_hidden_layers": n_layers})
    dummy = "the checkpoint has all of them, and dummy are random values"
    servers: tuple[tuple[str, str, _Flags, str, tuple[tuple[str, str], ...], str], ...] = (
        ("meshscope", f"meshscope predict {model}", _own_flags(experiment), OWN,
         (("--layers", str(n_layers)),), ""),
        ("vLLM on TPU", f"vllm serve {model}", _vllm_flags(experiment), VLLM_SERVE,
         (("--hf-overrides", override), ("--load-format", "dummy")), dummy),
        ("SGLang-JAX", f"python -m sgl_jax.launch_server --model-path {model}",
         _sglang_flags(experiment), SGLANG,
         (("--json-model-override-args", override), ("--load-format", "dummy")), dummy),
        ("MaxText", "python -m maxtext.inference.decode src/maxtext/configs/base.yml",
         _maxtext_flags(experiment), MAXTEXT,
         (("override_model_config=true", ""), (f"base_num_decoder_layers={n_layers}", "")),
         "a checkpoint has all of them"),
    )  # fmt: skip
    launches = list[Launch]()
    for server, start, of_plan, source, of_layers, lost in servers:
        parts = list(of_plan)
        if n_layers is not None:
            parts += [_flag(source, *filter(None, words)) for words in of_layers]
            parts += [f"the weights of the first layers: {lost}"] if lost else []
        flags = tuple(part for part in parts if isinstance(part, LaunchFlag))
        words = (word for flag in flags for word in flag.words)
        launches.append(
            Launch(
                server=server,
                command=f"{start} {shlex.join(words)}",
                flags=flags,
                not_expressed=tuple(part for part in parts if isinstance(part, str)),
            )
        )
    return tuple(launches)


def _flag(source: str, *words: str | int) -> LaunchFlag:
    return LaunchFlag(words=tuple(map(str, words)), source=source)


def _options(source: str, options: Mapping[str, str | int | None]) -> Iterator[LaunchFlag]:
    """The flags that have a value."""
    return (_flag(source, name, value) for name, value in options.items() if value is not None)


def _own_flags(experiment: Experiment) -> _Flags:
    workload, model = experiment.workload, experiment.model
    activations, weights, cache = (
        None if dtype == default else dtype
        for dtype, default in (
            (workload.activation_dtype, "bf16"),
            (workload.weight_dtype, model.default_weight_dtype),
            (workload.cache_dtype, workload.activation_dtype),
        )
    )
    # The common name, unless the option takes it as the name of the checkpoint's own format.
    if weights is not None and weight_dtype_of(model, format_dtype(weights)) == weights:
        weights = format_dtype(weights)
    is_default_chunk = with_default_chunk(experiment).workload == workload
    options = {
        "--topology": experiment.topology.name,
        "--plan": str(experiment.plan),
        "--device-order": order_text(experiment.mesh, experiment.topology),
        "--batch": workload.batch,
        "--prompt": workload.prompt,
        "--output": workload.output,
        "--dtype": activations,
        "--weight-dtype": weights,
        "--cache-dtype": None if cache is None else format_dtype(cache),
        "--prefill-chunk": None if is_default_chunk else workload.prefill_chunk or "off",
    }
    return _options(OWN, options)


def _vllm_flags(experiment: Experiment) -> _Flags:
    """Flags of vLLM, which counts --max-num-seqs per data-parallel rank."""
    plan, workload = experiment.plan, experiment.workload
    sharding = f"{VLLM} tpu_inference/layers/common/sharding.py"
    disagg = f"{VLLM} examples/disagg/run_disagg_single_host.sh"
    external = f"{VLLM} examples/external_lb/run_dp_external_lb.sh"
    yield _flag(sharding, "--tensor-parallel-size", plan.tp)
    if plan.data_size > 1:
        yield _flag(sharding, "--data-parallel-size", plan.data_size)
    if plan.expert_axes == ("tp",):
        deploy = f"{VLLM} examples/offload/gke/benchmarks/multi-host/deploy-baseline.yaml"
        yield _flag(deploy, "--enable-expert-parallel")
    if plan.pp > 1:
        executor = f"{VLLM} tpu_inference/executors/ray_distributed_executor.py"
        yield _flag(executor, "--pipeline-parallel-size", plan.pp)
    yield _flag(external, "--max-num-seqs", workload.batch // plan.data_size)
    yield _flag(external, "--max-model-len", workload.context)
    if workload.prefill_chunk is not None:
        yield _flag(disagg, "--max-num-batched-tokens", workload.prefill_chunk)
    if workload.cache_dtype == "f8e4m3fn":
        decode = f"{VLLM} .buildkite/kubernetes/manifests/v7x/single_decode.yaml"
        yield _flag(decode, "--kv-cache-dtype", "fp8")
    yield from _left_out(experiment, "pp")
    if plan.data_axis in plan.expert_axes:
        yield (
            f"ep={plan.ep} over {plan.data_axis}: enable_dp_attention in --additional-config splits "
            "attention over data and experts over devices, but chooses the sizes itself"
        )
    if workload.weight_dtype not in _as_loaded(experiment):
        yield _weights(experiment, "an additional_config with qwix rules")
    if workload.cache_dtype not in {"f8e4m3fn", workload.activation_dtype}:
        yield f"a cache in {format_dtype(workload.cache_dtype)}: the manifests show --kv-cache-dtype fp8 alone"


def _sglang_flags(experiment: Experiment) -> _Flags:
    """Flags of SGLang-JAX, whose --tp-size counts all devices: the mesh is (dp, tp-size / dp)."""
    plan, workload = experiment.plan, experiment.workload
    yield _flag(f"{SGLANG}, managers/scheduler.py", "--tp-size", plan.data_size * plan.tp)
    built_in = {"s8": "int8.yaml", "f8e4m3fn": "fp8.yaml"}
    options = {
        "--dp-size": plan.data_size if plan.data_size > 1 else None,
        "--ep-size": plan.ep if plan.ep > 1 else None,
        "--max-running-requests": workload.batch,
        "--context-length": workload.context,
        "--chunked-prefill-size": workload.prefill_chunk or -1,
        "--quantization-config-path": built_in.get(workload.weight_dtype),
        "--kv-cache-dtype": _FP8.get(workload.cache_dtype),
    }
    yield from _options(SGLANG, options)
    yield from _left_out(experiment)
    if workload.weight_dtype not in {*built_in, *_as_loaded(experiment)}:
        yield _weights(experiment, "a file for --quantization-config-path")
    if workload.cache_dtype not in {*_FP8, workload.activation_dtype}:
        yield f"a cache in {format_dtype(workload.cache_dtype)}: --kv-cache-dtype takes bf16 and fp8"


def _maxtext_flags(experiment: Experiment) -> _Flags:
    workload = experiment.workload
    yield from _maxtext_axes(experiment)
    if experiment.device_order is not None:
        yield _PLACEMENT
    yield _flag(MAXTEXT, f"per_device_batch_size={workload.batch / experiment.plan.n_devices:g}")
    yield _flag(MAXTEXT, f"max_prefill_predict_length={workload.prompt}")
    yield _flag(MAXTEXT, f"max_target_length={workload.context}")
    if workload.weight_dtype == "s8":
        yield _flag(MAXTEXT, "quantization=int8")
    elif workload.weight_dtype not in _as_loaded(experiment):
        yield f"weights in {format_dtype(workload.weight_dtype)}: another value of quantization"
    if workload.cache_dtype == "s8":
        yield _flag(MAXTEXT, "quantize_kvcache=true")
    elif workload.cache_dtype != workload.activation_dtype:
        yield f"a cache in {format_dtype(workload.cache_dtype)}: another value of kv_quant_dtype"
    if workload.prefill_chunk is not None and workload.prefill_chunk < workload.prompt:
        yield _flag(MAXTEXT, "use_chunked_prefill=true")
        yield _flag(MAXTEXT, f"prefill_chunk_size={workload.prefill_chunk}")
    yield "the model: MaxText has names of its own for model_name"


def _maxtext_axes(experiment: Experiment) -> _Flags:
    """Sizes on ICI, and of the outermost axis also on DCN; experts take a separate axis."""
    plan, n_slices = experiment.plan, experiment.topology.n_slices
    tensor = "tensor_sequence" if plan.sp else "tensor"
    axes = {"pipeline": plan.pp, "data": plan.dp, "fsdp": plan.fsdp}
    axes |= {"context": plan.cp, tensor: plan.tp}
    match plan.expert_axes:
        case ():
            pass
        case ("tp",):
            axes |= {tensor: 1, "expert": plan.ep}
        case (_,):
            axes |= {"data": 1, "fsdp": 1, "expert": plan.ep}
        case _:
            yield f"ep={plan.ep} over {plan.data_axis} and tp: an expert axis has its own devices"
    outermost = next((name for name, size in axes.items() if size > 1), "")
    for name, size in axes.items():
        n_dcn = n_slices if name == outermost and size % n_slices == 0 else 1
        if size > 1 or name == "fsdp":  # -1 by default
            yield _flag(MAXTEXT, f"ici_{name}_parallelism={size // n_dcn}")
        if n_dcn > 1:
            yield _flag(MAXTEXT, f"dcn_{name}_parallelism={n_dcn}")


def _left_out(experiment: Experiment, *known: str) -> Iterator[str]:
    plan = experiment.plan
    axes = {
        "sp: no flag splits the residual stream of every model over tp": plan.sp,
        f"cp={plan.cp}: no axis of its own splits the sequence": plan.cp > 1,
        f"pp={plan.pp}: no pipeline": plan.pp > 1 and "pp" not in known,
        f"fsdp={plan.fsdp}: dp replicates the weights instead": plan.fsdp > 1,
        _PLACEMENT: experiment.device_order is not None,
    }
    return (text for text, is_left_out in axes.items() if is_left_out)


def _as_loaded(experiment: Experiment) -> set[str]:
    """An engine's weight dtypes without an option: the activation dtype and the checkpoint's dtype."""
    return {experiment.workload.activation_dtype, experiment.model.default_weight_dtype}


def _weights(experiment: Experiment, how: str) -> str:
    return f"weights in {format_dtype(experiment.workload.weight_dtype)}: serve a quantized checkpoint, or use {how}"
