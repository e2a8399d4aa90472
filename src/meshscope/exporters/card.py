"""The workload card of a run, in the form of CCL-Bench; every field that can be known is filled.

What the template has no field for (program, slice, versions, figures of the run) stands under the key
`meshscope`. Texts of users are without control characters; an unknown value is null, never 0.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from meshscope.analysis.utilization import n_parameters
from meshscope.errors import SpecError
from meshscope.events.enums import Phase, Source
from meshscope.events.text import printable
from meshscope.exporters.schema import faults_of
from meshscope.spec.hardware.chips import Chip, ChipKind
from meshscope.spec.hardware.topology import Topology, parse_topology
from meshscope.spec.model.model import GroupedAttention, LatentAttention, Model
from meshscope.spec.model.stored import model_from_dict
from meshscope.spec.plan.plan import Plan, parse_plan
from meshscope.store.run import RunRecord

CARD = "card.yaml"
BITS_PER_BYTE = 8
_PRECISIONS = {
    "f32": "fp32",
    "f16": "fp16",
    "f8e4m3fn": "fp8_e4m3",
    "f8e5m2": "fp8_e5m2",
    "s8": "int8",
}

# Whose version is that of the driver, and of what carries collectives out: on a TPU libtpu is both; the
# devices of a CPU have no driver, and XLA's own code moves their bytes.
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
    """The card; `traces` are the kinds of traces beside it, `n_steps` how many steps those hold.

    SpecError where a value of the run does not fit the schema.
    """
    asked = run.manifest.experiment
    topology = parse_topology(str(asked["topology"]))
    model = _model(asked.get("model"))
    if n_steps is None and run.measured is not None:
        n_steps = sum(run.measured.n_profiled_steps.values()) or None
    card = {
        "version": 1,
        "description": _description(run, topology),
        "hf_url": _hub_url(asked.get("model")),
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
        "meshscope": _own(run),
    }
    cleaned = _safe(card)
    faults = list(faults_of(cleaned))
    if faults:
        raise SpecError(f"the run does not make a workload card: {'; '.join(faults)}.")
    return cleaned


def _model(stored: Mapping[str, Any] | None) -> Model | None:
    is_whole = stored is not None and {"family", "attention", "layers", "moe"} <= set(stored)
    return model_from_dict(stored) if stored is not None and is_whole else None


def _description(run: RunRecord, topology: Topology) -> str:
    asked = run.manifest.experiment
    name = (asked.get("model") or {}).get("name", "a program of unknown model")
    how = {
        Source.PREDICTED: "Predicted: no program was compiled or run",
        Source.COMPILED: "Compiled by the TPU compiler: no program was run",
        Source.MEASURED: "Measured on live devices",
    }[run.manifest.source]
    return f"Inference of {name} with plan {asked.get('plan')} on {topology.name}. {how}."


def _hub_url(stored: Mapping[str, Any] | None) -> str | None:
    """Where the model is on the Hugging Face hub; None for a name that is not `owner/name`."""
    name = "" if stored is None else str(stored.get("name", ""))
    parts = name.split("/")
    is_hub_name = len(parts) == 2 and all(
        p and p.replace("-", "").replace(".", "").replace("_", "").isalnum() for p in parts
    )
    return f"https://huggingface.co/{name}" if is_hub_name else None


def _model_fields(run: RunRecord, model: Model | None, n_steps: int | None) -> dict[str, Any]:
    workload = run.manifest.experiment.get("workload") or {}
    precision = workload.get("activation_dtype")
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
    if model is None:
        names = (
            "num_params",
            "num_params_active",
            "num_params_embedding",
            "num_layers",
            "num_heads",
            "head_dim",
        )
        return dict.fromkeys(names)
    total, met, embedding = n_parameters(model)
    return {
        "num_params": total,
        "num_params_active": met,
        "num_params_embedding": embedding,
        "num_layers": model.n_layers,
        "num_heads": model.attention.n_heads,
        "head_dim": _head_dim(model),
    }


def _head_dim(model: Model) -> int:
    """Width of a query head."""
    match model.attention:
        case LatentAttention() as latent:
            return latent.qk_dim
        case GroupedAttention() as grouped:
            return grouped.head_dim
        case compressed:
            return compressed.head_dim


def _data(run: RunRecord) -> dict[str, Any]:
    known = run.manifest.experiment.get("workload") or {}
    return {
        "batch_size": known.get("batch"),
        "seq_len": known.get("prompt"),
        "output_len": known.get("output"),
        "dataset": _dataset(run),
    }


def _dataset(run: RunRecord) -> str | None:
    """What was fed to the program; nothing is known of somebody else's."""
    if "imported" in run.manifest.experiment:
        return None
    if run.measured is None:
        return "none: shapes alone, no program was run"
    return "one prompt of text" if run.measured.texts else "random tokens"


def _hardware(run: RunRecord, topology: Topology) -> dict[str, Any]:
    chip = topology.chip
    return {
        "network_topo": {
            "topology": _network(topology),
            # Scale-out (between slices) is published nowhere as a figure of a slice; scale-up is all
            # links of a chip, one direction.
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
    """Chips of one host; virtual CPU devices are all of one."""
    if topology.chip.kind is ChipKind.CPU:
        return topology.n_chips
    return min(topology.chip.chips_per_host, topology.n_chips)


def _chip_name(chip: Chip) -> str:
    """As CCL-Bench writes chips: `tpu_v6e`."""
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
    """Gigabits a second that a chip can send over all its links."""
    if chip.link_bytes_per_s is None:
        return None
    n_links = 2 * chip.n_grid_dims if chip.kind is ChipKind.TPU else 1
    return n_links * chip.link_bytes_per_s * BITS_PER_BYTE / 1e9


def _versioned(run: RunRecord, *names: str) -> str | None:
    versions = run.manifest.versions
    return next((f"{name} {versions[name]}" for name in names if name in versions), None)


def _executor(run: RunRecord, topology: Topology) -> dict[str, Any]:
    asked = run.manifest.experiment
    plan = parse_plan(str(asked["plan"])).filled(topology.n_devices)
    program = asked.get("program") or {}
    is_tpu = topology.chip.kind is ChipKind.TPU
    over_dcn = ["dcn"] if topology.n_slices > 1 else []
    protocols = ["ici", *over_dcn] if is_tpu else []
    return {
        "framework": {
            "name": program.get("frontend"),
            "compiler_tool_selection": "xla" if is_tpu or program else None,
        },
        "model_plan_parallelization": {
            "dp_replicate": plan.dp,
            "dp_shard": plan.fsdp,
            "tp": plan.tp,
            "pp": plan.pp,
            "cp": plan.cp,
            "ep": plan.ep,
            "pp_mb": _microbatch(asked, plan),
        },
        "communication_library": {
            "name": _LIBRARIES[topology.chip.kind],
            "version": _versioned(run, *_VERSIONED[topology.chip.kind]),
            "env": dict(run.manifest.flags),
        },
        "protocol_selection": protocols,
    }


def _microbatch(asked: Mapping[str, Any], plan: Plan) -> int:
    """Sequences of a device's batch that pass through the pipeline together in prefill; 1 without one."""
    n = (asked.get("microbatches") or {}).get(Phase.PREFILL.value)
    batch = (asked.get("workload") or {}).get("batch")
    if plan.pp == 1 or n is None or batch is None:
        return 1
    return max(1, batch // (plan.dp * plan.fsdp) // n)


def _own(run: RunRecord) -> dict[str, Any]:
    """What the template has no field for."""
    asked = run.manifest.experiment
    return {
        "source": run.manifest.source.value,
        "plan": asked.get("plan"),
        "slice": asked.get("topology"),
        "engine": asked.get("engine"),
        "program": asked.get("program"),
        "weight_dtype": (asked.get("workload") or {}).get("weight_dtype"),
        "cache_dtype": (asked.get("workload") or {}).get("cache_dtype"),
        "bandwidth_gbps": "scale-up: all links of a chip, one direction, published peak",
        "created": run.manifest.created,
        "command": list(run.manifest.command),
        "versions": dict(run.manifest.versions),
    }


def _safe(value: Any) -> Any:
    """The value with plain types and texts without control characters."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(name)): _safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(item) for item in value]
    return value
