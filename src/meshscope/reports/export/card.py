"""CCL-Bench's workload card: its JSON Schema, the card of a run, and the cards of others.

Schema: workload_card_template.yaml of cornell-sysphotonics/ccl-bench@1d257f0. Every field of the template is required;
unknown and inapplicable values are null, never 0. Other keys are allowed, because CCL-Bench displays them: facts without
a field (program, slice, versions) are under the key `meshscope`. Texts contain no control characters.

A card of others may lack fields, hold text for numbers, or describe a plan that its hardware
cannot have. What cannot be used is a finding, and the field stays unknown.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import yaml

from meshscope.analysis.utilization import n_parameters
from meshscope.errors import MeshscopeError, SpecError
from meshscope.events.enums import Phase, Source
from meshscope.events.timeline import printable
from meshscope.files import read_file
from meshscope.hardware.chips import Chip, ChipKind, chip_of
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.model import Model
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.plan import ALIASES, AXES, Plan, parse_plan
from meshscope.store.run import RunRecord

Schema = dict[str, Any]

_TEXT: Schema = {"type": ["string", "null"]}
_NAME: Schema = {"type": "string", "minLength": 1}
_FLAG: Schema = {"type": ["boolean", "null"]}
_COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
_SIZE: Schema = {"type": "integer", "minimum": 1}
_NUMBER: Schema = {"type": ["number", "null"], "minimum": 0}

# Axes of a plan by their fields in the card.
CARD_AXES = {
    "dp_replicate": "dp",
    "dp_shard": "fsdp",
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "ep": "ep",
}


def _object(properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _each(names: str, schema: Schema) -> Schema:
    return dict.fromkeys(names.split(), schema)


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _one_of(*values: Any, of: str = "string") -> Schema:
    return {"type": of, "enum": list(values)}


_MODEL = {
    "phase": _one_of("training", "inference", "serving"),
    "moe": _FLAG,
    "granularity": _one_of("model_fwd_bwd_pass", "model_fwd", "layer", "kernel"),
    **_each("model_family precision", _TEXT),
    **_each("epochs iteration", _COUNT),
    "model_arch": _object(
        _each(
            "num_params num_params_active num_params_embedding num_layers num_heads head_dim",
            _COUNT,
        )
    ),
}
_HARDWARE = {
    "network_topo": _object(
        {"topology": _TEXT, "bandwidth_gbps": _list(_NUMBER, minItems=2, maxItems=2)}
    ),
    "xpu_spec": _object(
        {
            "type": _one_of("TPU", "GPU", "CPU"),
            "model": _NAME,
            **_each("total_count count_per_node", _SIZE),
        }
    ),
    "driver_version": _TEXT,
}
_EXECUTOR = {
    "framework": _object(_each("name compiler_tool_selection", _TEXT)),
    "model_plan_parallelization": _object(
        _each(f"{' '.join(CARD_AXES)} pp_mb", {**_SIZE, "type": ["integer", "null"]})
    ),
    "communication_library": _object({**_each("name version", _TEXT), "env": {"type": "object"}}),
    "protocol_selection": _list({"type": "string"}),
}
_WORKLOAD = {
    "model": _object(_MODEL),
    "data": _object({**_each("batch_size seq_len output_len", _COUNT), "dataset": _TEXT}),
    "hardware": _object(_HARDWARE),
}
CARD_SCHEMA: Schema = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "CCL-Bench workload card",
    **_object(
        {
            "version": _one_of(1, of="integer"),
            "description": _NAME,
            **_each("hf_url trace_url contributor contact", _TEXT),
            "workload": _object(_WORKLOAD),
            "Model-executor": _object(_EXECUTOR),
            "metric_source": _object(
                {
                    "traces": _list(_one_of("json_tpu", "json", "nsys")),
                    "metrics_specific_trace": _list({"type": "string"}),
                }
            ),
        }
    ),
}

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def faults_of(
    value: Any, schema: Mapping[str, Any] = CARD_SCHEMA, at: str = "card"
) -> Iterator[str]:
    """The violations of the schema, each with its path."""
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types
    if names and not any(_is_of(value, name) for name in names):
        yield f"{at}: {value!r} is not {' or '.join(names)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r} is none of {schema['enum']}"
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        yield f"{at}: {value} is below {schema['minimum']}"
    if isinstance(value, str | list):
        yield from _length_faults(value, schema, at)
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from faults_of(item, schema.get("items", {}), f"{at}[{index}]")
    if isinstance(value, dict):
        yield from (
            f"{at}: '{name}' is missing" for name in schema.get("required", ()) if name not in value
        )
        for name, of_property in schema.get("properties", {}).items():
            if name in value:
                yield from faults_of(value[name], of_property, f"{at}.{name}")


def _length_faults(value: str | list[Any], schema: Mapping[str, Any], at: str) -> Iterator[str]:
    least = schema.get("minLength" if isinstance(value, str) else "minItems", 0)
    most = len(value) if isinstance(value, str) else schema.get("maxItems", len(value))
    if not least <= len(value) <= most:
        yield f"{at}: has length {len(value)}, not {least} to {most}"


def _is_of(value: Any, name: str) -> bool:
    is_bool = isinstance(value, bool)
    return isinstance(value, _TYPES[name]) and (not is_bool or name == "boolean")


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
        "head_dim": attention.head_widths[0],
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


MAX_CARD_BYTES = 1 << 20
MAX_FAULTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCard:
    """What a card says; None if it does not say, or in a form that cannot be used."""

    path: Path
    plan: Plan | None
    topology: Topology | None
    model_name: str | None
    n_devices: int | None
    traces: tuple[str, ...]  # kinds of traces beside it: json_tpu, json, nsys
    findings: tuple[str, ...]


def read_card(path: Path) -> WorkloadCard:
    """The card; SpecError if the file is not YAML of a card."""
    card = _document(path)
    extra = _mapping(card, "meshscope")
    findings: list[str] = []
    topology = _topology(card, extra, findings)
    n_devices = _size(_at(card, "workload", "hardware", "xpu_spec", "total_count"))
    plan = _plan(card, extra, topology, findings)
    faults = [fault.removeprefix("card.") for fault in faults_of(card)]
    if faults:
        more = f" and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
        findings.append(
            f"{path.name} departs from the template: {'; '.join(faults[:MAX_FAULTS])}{more}"
        )
    traces = _at(card, "metric_source", "traces")
    return WorkloadCard(
        path=path,
        plan=plan,
        topology=topology,
        model_name=_model_name(card),
        n_devices=n_devices if topology is None else topology.n_devices,
        traces=tuple(map(str, traces)) if isinstance(traces, list) else (),
        findings=tuple(findings),
    )


def is_card(path: Path) -> bool:
    """Whether a YAML file has the sections of a card."""
    try:
        _document(path)
    except SpecError:
        return False
    return True


def _document(path: Path) -> Mapping[str, Any]:
    remedy = "Give a card like CCL-Bench's workload_card_template.yaml."
    try:
        card = yaml.safe_load(read_file(path, MAX_CARD_BYTES))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}. {remedy}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SpecError(f"{path}: is no YAML: {reason}. {remedy}") from error
    if not isinstance(card, dict) or not isinstance(card.get("workload"), dict):
        raise SpecError(f"{path}: has no 'workload'. {remedy}")
    return card


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = values.get(key)
    return inner if isinstance(inner, dict) else {}


def _at(card: Mapping[str, Any], *keys: str) -> Any:
    """The value under the keys; None if one is missing."""
    *path, last = keys
    for key in path:
        card = _mapping(card, key)
    return card.get(last)


def _size(value: Any) -> int | None:
    """A size of at least 1, also written as text."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _plan(
    card: Mapping[str, Any],
    extra: Mapping[str, Any],
    topology: Topology | None,
    findings: list[str],
) -> Plan | None:
    """The plan of the card; one that does not fill the slice is left out."""
    sizes = _mapping(_mapping(card, "Model-executor"), "model_plan_parallelization")
    known = {axis: n for key, axis in CARD_AXES.items() if (n := _size(sizes.get(key))) and n > 1}
    text = extra.get("plan") if isinstance(extra.get("plan"), str) else None
    if text is None and (sizes or known):
        text = ",".join(f"{axis}={n}" for axis, n in known.items()) or "tp=1"
    if text is None:
        return None
    for attempt in _attempts(text):
        try:
            plan = parse_plan(attempt)
            return plan if topology is None else plan.filled(topology.n_devices)
        except MeshscopeError as error:
            findings.append(f"the plan '{attempt}' of the card cannot be used: {error}")
    return None


def _attempts(plan: str) -> Sequence[str]:
    """The plan, then without ep: cards of others count experts' devices in several ways."""
    without = ",".join(word for word in plan.split(",") if not word.startswith("ep="))
    return [plan] if without in {plan, ""} else [plan, without]


def _topology(
    card: Mapping[str, Any], extra: Mapping[str, Any], findings: list[str]
) -> Topology | None:
    """`v6e:2x4` or `2xh100:8`, from the chip, the number of chips, and chips of a node."""
    name = extra.get("slice")
    spec = _mapping(_mapping(_mapping(card, "workload"), "hardware"), "xpu_spec")
    model, total = spec.get("model"), _size(spec.get("total_count"))
    if not isinstance(name, str):
        if not isinstance(model, str) or total is None:
            return None
        name = _topology_name(model, total, _size(spec.get("count_per_node")))
    try:
        return parse_topology(name, is_imported=True)
    except MeshscopeError as error:
        findings.append(f"the hardware of the card cannot be used: {error}")
        return None


def _topology_name(model: str, total: int, per_node: int | None) -> str:
    words = model.lower().replace("-", "_").split("_")
    chip_name = next(
        (w for w in words if w not in {"nvidia", "tpu", "google", "sxm", "80gb"}), model
    )
    chip_name = "tpu7x" if chip_name in {"v7x", "7x"} else chip_name
    try:
        chip = chip_of(chip_name, is_imported=True)
    except MeshscopeError:
        return f"{chip_name}:{total}"
    if chip.kind is ChipKind.TPU:
        return f"{chip.name}-{total * (2 if chip.name_counts_cores else 1)}"
    n_nodes = total // per_node if per_node and not total % per_node else 1
    slices = f"{n_nodes}x" if n_nodes > 1 else ""
    return f"{slices}{chip.name}:{total // n_nodes}"


def _model_name(card: Mapping[str, Any]) -> str | None:
    """`meta-llama/Llama-3.1-8B`, from the URL of the Hub."""
    url = card.get("hf_url")
    if not isinstance(url, str) or "huggingface.co/" not in url:
        return None
    words = url.partition("huggingface.co/")[2].strip("/").split("/")
    return "/".join(words[:2]) if len(words) >= 2 else None
