"""Writes the CCL-Bench workload card of a run.

Facts without a field in the template (program, slice, versions) are under the key `meshscope`.
Unknown values are null, never 0. Texts contain no control characters.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import yaml

from meshscope.analysis.utilization import n_parameters
from meshscope.errors import SpecError
from meshscope.events.enums import Phase, Source
from meshscope.events.timeline import printable
from meshscope.hardware.chips import Chip, ChipKind
from meshscope.hardware.topology import Topology
from meshscope.model.model import LatentAttention, Model
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.plan import ALIASES, AXES, Plan
from meshscope.reports.export.schema import CARD_AXES, faults_of
from meshscope.store.run import RunRecord

CARD = "card.yaml"
BITS_PER_BYTE = 8
_PRECISIONS = {
    "f32": "fp32",
    "f16": "fp16",
    "f8e4m3fn": "fp8_e4m3",
    "f8e5m2": "fp8_e5m2",
    "s8": "int8",
    "s8_w8a8": "int8",
    "f8e4m3fn_w8a8": "fp8_e4m3",
}

# Packages whose versions stand for the driver and for the communication library. On TPUs libtpu is
# both; CPU devices have no driver, and XLA itself moves their bytes.
_DRIVERS = {ChipKind.TPU: ("libtpu",), ChipKind.GPU: (), ChipKind.CPU: ()}
_LIBRARIES = {ChipKind.TPU: "xla", ChipKind.GPU: None, ChipKind.CPU: "xla"}
_VERSIONED = {ChipKind.TPU: ("libtpu", "jaxlib"), ChipKind.GPU: (), ChipKind.CPU: ("jaxlib",)}


def card_text(run: RunRecord, *, traces: tuple[str, ...] = (), n_steps: int | None = None) -> str:
    """The card as YAML."""
    card = card_of(run, traces=traces, n_steps=n_steps)
    return yaml.safe_dump(card, sort_keys=False, allow_unicode=True, width=100)


def card_of(
    run: RunRecord, *, traces: tuple[str, ...] = (), n_steps: int | None = None
) -> dict[str, Any]:
    """The card; `traces` are the kinds of traces next to it, with `n_steps` steps in all.

    SpecError if a value of the run does not fit the schema.
    """
    experiment = run.manifest.experiment
    topology, model = experiment.topology, experiment.architecture
    if topology is None:
        raise SpecError("the run does not make a workload card: its slice is not known.")
    if n_steps is None and run.measured is not None:
        n_steps = sum(run.measured.n_profiled_steps.values()) or None
    card = {
        "version": 1,
        "description": _description(run, topology),
        "hf_url": _hub_url(experiment.model_name),
        "trace_url": None,
        "contributor": None,
        "contact": None,
        "workload": {
            "model": _model_fields(run, model, n_steps),
            "data": _data(run),
            "hardware": _hardware(run, topology),
        },
        "Model-executor": _executor(run, topology),
        "metric_source": {"traces": list(traces), "metrics_specific_trace": []},
        "meshscope": _extra_fields(run),
    }
    cleaned = _printable(card)
    faults = list(faults_of(cleaned))
    if faults:
        raise SpecError(f"the run does not make a workload card: {'; '.join(faults)}.")
    return cleaned


def _description(run: RunRecord, topology: Topology) -> str:
    experiment = run.manifest.experiment
    name = experiment.model_name or "a program of unknown model"
    how = {
        Source.PREDICTED: "Predicted: no program was compiled or run",
        Source.COMPILED: "Compiled by the TPU compiler: no program was run",
        Source.MEASURED: "Measured on live devices",
    }[run.manifest.source]
    return f"Inference of {name} with plan {experiment.layout} on {topology.name}. {how}."


def _hub_url(name: str | None) -> str | None:
    """URL of the model on the Hugging Face Hub; None if its name is not `owner/name`."""
    parts = (name or "").split("/")
    is_hub_name = len(parts) == 2 and all(
        p and p.replace("-", "").replace(".", "").replace("_", "").isalnum() for p in parts
    )
    return f"https://huggingface.co/{name}" if is_hub_name else None


def _model_fields(run: RunRecord, model: Model | None, n_steps: int | None) -> dict[str, Any]:
    workload = run.manifest.experiment.workload
    precision = None if workload is None else workload.activation_dtype
    return {
        "phase": "inference",
        "moe": None if model is None else model.moe is not None,
        "granularity": "model_fwd",
        "model_family": None if model is None else model.name.rsplit("/", 1)[-1].lower(),
        "precision": None if precision is None else _PRECISIONS.get(precision, precision),
        "epochs": None,
        "iteration": n_steps,
        "model_arch": _arch(model),
    }


def _arch(model: Model | None) -> dict[str, int | None]:
    params = ("num_params", "num_params_active", "num_params_embedding")
    if model is None:
        return dict.fromkeys((*params, "num_layers", "num_heads", "head_dim"))
    attention = model.attention
    return {
        **dict(zip(params, n_parameters(model), strict=True)),
        "num_layers": model.n_layers,
        "num_heads": attention.n_heads,
        "head_dim": attention.qk_dim
        if isinstance(attention, LatentAttention)
        else attention.head_dim,
    }


def _data(run: RunRecord) -> dict[str, Any]:
    workload = run.manifest.experiment.workload
    fields = {"batch_size": "batch", "seq_len": "prompt", "output_len": "output"}
    sizes = {field: getattr(workload, name, None) for field, name in fields.items()}
    return {**sizes, "dataset": _dataset(run)}


def _dataset(run: RunRecord) -> str | None:
    """Input of the program; unknown for imported programs."""
    if run.manifest.experiment.imported is not None:
        return None
    if run.measured is None:
        return "none: shapes only, no program was run"
    return "one prompt of text" if run.measured.texts else "random tokens"


def _hardware(run: RunRecord, topology: Topology) -> dict[str, Any]:
    chip = topology.chip
    return {
        "network_topo": {
            "topology": _network(topology),
            # Scale-out bandwidth (between slices) is not published; scale-up is that of all links of
            # a chip in one direction.
            "bandwidth_gbps": [None, _scale_up_gbps(chip)],
        },
        "xpu_spec": {
            "type": chip.kind.value.upper(),
            "model": _chip_name(chip),
            "total_count": topology.n_chips,
            "count_per_node": _chips_of_node(topology),
        },
        "driver_version": _versioned(run, *_DRIVERS[chip.kind]),
    }


def _chips_of_node(topology: Topology) -> int:
    """Chips of one host; all virtual CPU devices are on one host."""
    if topology.chip.kind is ChipKind.CPU:
        return topology.n_chips
    return min(topology.chip.chips_per_host, topology.n_chips)


def _chip_name(chip: Chip) -> str:
    """The name of a chip in CCL-Bench: `tpu_v6e`."""
    if chip.kind is not ChipKind.TPU:
        return chip.name
    return (
        f"tpu_{chip.name}" if chip.name.startswith("v") else f"tpu_v{chip.name.removeprefix('tpu')}"
    )


def _network(topology: Topology) -> str:
    grid = "x".join(map(str, topology.grid))
    match topology.chip.kind:
        case ChipKind.TPU:
            slices = f"{topology.n_slices} slices over DCN, each " if topology.n_slices > 1 else ""
            return f"{slices}ICI torus {grid}"
        case ChipKind.GPU:
            return "NVLink"
        case ChipKind.CPU:
            return "memory of one host"


def _scale_up_gbps(chip: Chip) -> float | None:
    """Gigabits per second that a chip sends over all its links."""
    if chip.link_bytes_per_s is None:
        return None
    n_links = 2 * chip.n_grid_dims if chip.kind is ChipKind.TPU else 1
    return n_links * chip.link_bytes_per_s * BITS_PER_BYTE / 1e9


def _versioned(run: RunRecord, *names: str) -> str | None:
    versions = run.manifest.versions
    return next((f"{name} {versions[name]}" for name in names if name in versions), None)


def _executor(run: RunRecord, topology: Topology) -> dict[str, Any]:
    experiment = run.manifest.experiment
    program = experiment.program
    is_tpu = topology.chip.kind is ChipKind.TPU
    over_dcn = ["dcn"] if topology.n_slices > 1 else []
    protocols = ["ici", *over_dcn] if is_tpu else []
    return {
        "framework": {
            "name": None if program is None else program.frontend.value,
            "compiler_tool_selection": "xla" if is_tpu or program is not None else None,
        },
        "model_plan_parallelization": _parallelization(experiment),
        "communication_library": {
            "name": _LIBRARIES[topology.chip.kind],
            "version": _versioned(run, *_VERSIONED[topology.chip.kind]),
            "env": dict(run.manifest.flags),
        },
        "protocol_selection": protocols,
    }


def _parallelization(experiment: ExperimentRecord) -> dict[str, int | None]:
    """Sizes of the template's axes; None for a mesh with axes of unknown meaning."""
    plan = experiment.plan
    if plan is not None:
        sizes = {field: getattr(plan, axis) for field, axis in CARD_AXES.items()}
        return {**sizes, "pp_mb": _microbatch(experiment, plan)}
    meanings = {name: ALIASES.get(name, name) for name in experiment.mesh}
    if not set(meanings.values()) <= set(AXES):
        return dict.fromkeys((*CARD_AXES, "pp_mb"))
    sizes = {
        field: prod(n for name, n in experiment.mesh.items() if meanings[name] == axis)
        for field, axis in CARD_AXES.items()
    }
    return {**sizes, "pp_mb": 1 if sizes["pp"] == 1 else None}


def _microbatch(experiment: ExperimentRecord, plan: Plan) -> int:
    """Sequences per device in one microbatch of prefill; 1 without a pipeline."""
    n, workload = experiment.microbatches.get(Phase.PREFILL), experiment.workload
    if plan.pp == 1 or n is None or workload is None:
        return 1
    return max(1, workload.batch // (plan.dp * plan.fsdp) // n)


def _extra_fields(run: RunRecord) -> dict[str, Any]:
    """Facts without a field in the template."""
    experiment = run.manifest.experiment.as_dict()
    workload = experiment.get("workload") or {}
    return {
        "source": run.manifest.source.value,
        "plan": experiment.get("plan"),
        "mesh": experiment.get("mesh"),
        "slice": experiment.get("topology"),
        "engine": experiment.get("engine"),
        "program": experiment.get("program"),
        "weight_dtype": workload.get("weight_dtype"),
        "cache_dtype": workload.get("cache_dtype"),
        "bandwidth_gbps": "scale-up: all links of a chip, one direction, published peak",
        "created": run.manifest.created,
        "command": list(run.manifest.command),
        "versions": dict(run.manifest.versions),
    }


def _printable(value: Any) -> Any:
    """The value in plain types, with printable texts."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(name)): _printable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value
