"""CCL-Bench's workload card: the table of its fields, the card of a run, and the cards of others.

Fields: workload_card_template.yaml of cornell-sysphotonics/ccl-bench@1d257f0. Every field of the template is required;
unknown and inapplicable values are null, never 0. Other keys are allowed, because CCL-Bench displays them: facts without
a field (program, slice, versions) are under the key `meshscope`. Texts contain no control characters.

A card of others may lack fields, hold text for numbers, or describe a plan that its hardware
cannot have. What cannot be used is a finding, and the field stays unknown.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshscope.analysis.utilization import n_parameters
from meshscope.errors import MeshscopeError, SpecError
from meshscope.events.enums import Phase, Source
from meshscope.events.timeline import printable
from meshscope.files import read_file
from meshscope.hardware.chips import ChipKind, chip_of
from meshscope.hardware.topology import Topology, parse_topology
from meshscope.model.model import Model
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.plan import ALIASES, AXES, Plan, parse_plan
from meshscope.plans.workload import Workload
from meshscope.store.run import RunRecord

CARD = "card.yaml"
_HUB = re.compile(r".*?huggingface\.co/+([\w.-]+/[\w.-]+)")  # `meta-llama/Llama-3.1-8B`
BITS_PER_BYTE = 8
MAX_CARD_BYTES = 1 << 20
MAX_FAULTS = 4

# Axes of a plan by their fields in the card.
CARD_AXES = {
    "dp_replicate": "dp", "dp_shard": "fsdp", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep",
}  # fmt: skip
_PRECISIONS = {
    "f32": "fp32", "f16": "fp16", "f8e4m3fn": "fp8_e4m3", "f8e5m2": "fp8_e5m2", "s8": "int8",
    "s8_w8a8": "int8", "f8e4m3fn_w8a8": "fp8_e4m3",
}  # fmt: skip
# The packages whose versions stand for the driver, the communication library, and the packages of
# its version. On TPUs libtpu is both; CPU devices have no driver, and XLA itself moves their bytes.
_SOFTWARE: dict[ChipKind, tuple[tuple[str, ...], str | None, tuple[str, ...]]] = {
    ChipKind.TPU: (("libtpu",), "xla", ("libtpu", "jaxlib")),
    ChipKind.GPU: ((), None, ()),
    ChipKind.CPU: ((), "xla", ("jaxlib",)),
}
_HOW = {
    Source.PREDICTED: "Predicted: no program was compiled or run",
    Source.COMPILED: "Compiled by the TPU compiler: no program was run",
    Source.MEASURED: "Measured on live devices",
}


class _Facts(NamedTuple):
    """A run, and the kinds of traces next to its card, with `n_steps` steps in all."""

    run: RunRecord
    experiment: ExperimentRecord
    topology: Topology
    model: Model | None
    workload: Workload | None
    traces: tuple[str, ...]
    n_steps: int | None


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the template: its JSON types, the limits of its values, and its value for a run.

    `least` is the minimum of a number or of a text's length.
    """

    types: str
    value: Callable[[_Facts], Any] = lambda _: None
    least: int | None = None
    among: tuple[Any, ...] = ()
    items: "Field | None" = None
    n_items: int | None = None


Fields = Mapping[str, "Field | Fields"]


def _description(facts: _Facts) -> str:
    name = facts.experiment.model_name or "a program of unknown model"
    plan, how = facts.experiment.layout, _HOW[facts.run.manifest.source]
    return f"Inference of {name} with plan {plan} on {facts.topology.name}. {how}."


def _hub_url(facts: _Facts) -> str | None:
    """URL of the model on the Hugging Face Hub; None if its name is not `owner/name`."""
    name = facts.experiment.model_name or ""
    parts = [part.translate({ord(c): None for c in "-._"}) for part in name.split("/")]
    is_hub_name = len(parts) == 2 and all(map(str.isalnum, parts))
    return f"https://huggingface.co/{name}" if is_hub_name else None


def _precision(facts: _Facts) -> str | None:
    dtype = None if facts.workload is None else facts.workload.activation_dtype
    return None if dtype is None else _PRECISIONS.get(dtype, dtype)


def _dataset(facts: _Facts) -> str | None:
    """Input of the program; unknown for imported programs."""
    if facts.experiment.imported is not None:
        return None
    if facts.run.measured is None:
        return "none: shapes only, no program was run"
    return "one prompt of text" if facts.run.measured.texts else "random tokens"


def _network(facts: _Facts) -> str:
    topology = facts.topology
    match topology.chip.kind:
        case ChipKind.TPU:
            slices = f"{topology.n_slices} slices over DCN, each " if topology.n_slices > 1 else ""
            return f"{slices}ICI torus {'x'.join(map(str, topology.grid))}"
        case ChipKind.GPU:
            return "NVLink"
        case ChipKind.CPU:
            return "memory of one host"


def _bandwidth_gbps(facts: _Facts) -> list[float | None]:
    """Scale-out bandwidth (between slices; not published), and the bandwidth of all links of a chip."""
    chip = facts.topology.chip
    if chip.link_bytes_per_s is None:
        return [None, None]
    n_links = 2 * chip.n_grid_dims if chip.kind is ChipKind.TPU else 1
    return [None, n_links * chip.link_bytes_per_s * BITS_PER_BYTE / 1e9]


def _chip_name(facts: _Facts) -> str:
    """The name of a chip in CCL-Bench: `tpu_v6e`."""
    name = facts.topology.chip.name
    is_tpu = facts.topology.chip.kind is ChipKind.TPU
    return f"tpu_v{name.removeprefix('tpu').removeprefix('v')}" if is_tpu else name


def _chips_of_node(facts: _Facts) -> int:
    """Chips of one host; all virtual CPU devices are on one host."""
    topology = facts.topology
    is_one_host = topology.chip.kind is ChipKind.CPU
    return topology.n_chips if is_one_host else min(topology.chip.chips_per_host, topology.n_chips)


def _version(facts: _Facts, *, is_driver: bool) -> str | None:
    """Name and version of the first known package of the driver, or of the communication library."""
    driver, _, library = _SOFTWARE[facts.topology.chip.kind]
    versions = facts.run.manifest.versions
    names = (name for name in (driver if is_driver else library) if name in versions)
    return next((f"{name} {versions[name]}" for name in names), None)


def _is_tpu(facts: _Facts) -> bool:
    return facts.topology.chip.kind is ChipKind.TPU


def _axis(facts: _Facts, axis: str) -> int | None:
    """Size of an axis of the plan; None for a mesh with axes of unknown meaning."""
    plan, mesh = facts.experiment.plan, facts.experiment.mesh
    if plan is not None:
        return getattr(plan, axis)
    meanings = {name: ALIASES.get(name, name) for name in mesh}
    is_known = set(meanings.values()) <= set(AXES)
    return prod(n for name, n in mesh.items() if meanings[name] == axis) if is_known else None


def _microbatch(facts: _Facts) -> int | None:
    """Sequences per device in one microbatch of prefill; 1 without a pipeline."""
    plan, n = facts.experiment.plan, facts.experiment.microbatches.get(Phase.PREFILL)
    if plan is None or plan.pp == 1 or n is None or facts.workload is None:
        return 1 if plan is not None or _axis(facts, "pp") == 1 else None
    return max(1, facts.workload.batch // (plan.dp * plan.fsdp) // n)


def _of(path: str) -> Callable[[_Facts], Any]:
    """The attribute of the facts at this path; None if one on the way is unknown."""

    def value(facts: _Facts) -> Any:
        fact: Any = facts
        for name in path.split("."):
            fact = None if fact is None else getattr(fact, name)
        return fact

    return value


_TEXT, _COUNT = "string null", partial(Field, "integer null", least=0)
FIELDS: Fields = {
    "version": Field("integer", lambda _: 1, among=(1,)),
    "description": Field("string", _description, least=1),
    "hf_url": Field(_TEXT, _hub_url),
    "trace_url": Field(_TEXT),
    "contributor": Field(_TEXT),
    "contact": Field(_TEXT),
    "workload": {
        "model": {
            "phase": Field("string", lambda _: "inference", among=("training", "inference", "serving")),
            "moe": Field("boolean null", lambda f: f.model and f.model.moe is not None),
            "granularity": Field("string", lambda _: "model_fwd", among=("model_fwd_bwd_pass", "model_fwd", "layer", "kernel")),
            "model_family": Field(_TEXT, lambda f: f.model and f.model.name.rsplit("/", 1)[-1].lower()),
            "precision": Field(_TEXT, _precision),
            "epochs": _COUNT(),
            "iteration": _COUNT(_of("n_steps")),
            "model_arch": {
                "num_params": _COUNT(lambda f: f.model and n_parameters(f.model)[0]),
                "num_params_active": _COUNT(lambda f: f.model and n_parameters(f.model)[1]),
                "num_params_embedding": _COUNT(lambda f: f.model and n_parameters(f.model)[2]),
                "num_layers": _COUNT(_of("model.n_layers")),
                "num_heads": _COUNT(_of("model.attention.n_heads")),
                "head_dim": _COUNT(lambda f: f.model and f.model.attention.head_widths[0]),
            },
        },
        "data": {
            "batch_size": _COUNT(_of("workload.batch")),
            "seq_len": _COUNT(_of("workload.prompt")),
            "output_len": _COUNT(_of("workload.output")),
            "dataset": Field(_TEXT, _dataset),
        },
        "hardware": {
            "network_topo": {
                "topology": Field(_TEXT, _network),
                "bandwidth_gbps": Field("array", _bandwidth_gbps, items=Field("number null", least=0), n_items=2),
            },
            "xpu_spec": {
                "type": Field("string", lambda f: f.topology.chip.kind.value.upper(), among=("TPU", "GPU", "CPU")),
                "model": Field("string", _chip_name, least=1),
                "total_count": Field("integer", _of("topology.n_chips"), least=1),
                "count_per_node": Field("integer", _chips_of_node, least=1),
            },
            "driver_version": Field(_TEXT, partial(_version, is_driver=True)),
        },
    },
    "Model-executor": {
        "framework": {
            "name": Field(_TEXT, _of("experiment.program.frontend.value")),
            "compiler_tool_selection": Field(_TEXT, lambda f: "xla" if _is_tpu(f) or f.experiment.program else None),
        },
        "model_plan_parallelization": {
            **{
                name: Field("integer null", partial(_axis, axis=axis), least=1)
                for name, axis in CARD_AXES.items()
            },
            "pp_mb": Field("integer null", _microbatch, least=1),
        },
        "communication_library": {
            "name": Field(_TEXT, lambda f: _SOFTWARE[f.topology.chip.kind][1]),
            "version": Field(_TEXT, partial(_version, is_driver=False)),
            "env": Field("object", _of("run.manifest.flags")),
        },
        "protocol_selection": Field("array", lambda f: ["ici", "dcn"][: f.topology.n_slices] if _is_tpu(f) else [], items=Field("string")),
    },
    "metric_source": {
        "traces": Field("array", _of("traces"), items=Field("string", among=("json_tpu", "json", "nsys"))),
        "metrics_specific_trace": Field("array", lambda _: [], items=Field("string")),
    },
}  # fmt: skip


def faults_of(value: Any, field: "Field | Fields" = FIELDS, at: str = "card") -> Iterator[str]:
    """The departures from the template, each with its path."""
    names = field.types.split() if isinstance(field, Field) else ["object"]
    kinds = tuple(kind for name in names for kind in _TYPES[name])
    if type(value) not in kinds:
        yield f"{at}: {value!r} is not {' or '.join(names)}"
    elif isinstance(field, Field):
        if field.among and value not in field.among:
            yield f"{at}: {value!r} is none of {list(field.among)}"
        if isinstance(value, int | float) and field.least is not None and value < field.least:
            yield f"{at}: {value} is below {field.least}"
        if value == "" and field.least:
            yield f"{at}: is empty"
        if isinstance(value, list) and field.items is not None:
            if field.n_items not in {None, len(value)}:
                yield f"{at}: has length {len(value)}, not {field.n_items}"
            for index, item in enumerate(value):
                yield from faults_of(item, field.items, f"{at}[{index}]")
    else:
        yield from (f"{at}: '{name}' is missing" for name in field if name not in value)
        for name in filter(value.__contains__, field):
            yield from faults_of(value[name], field[name], f"{at}.{name}")


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,),
    "number": (int, float), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def card_text(run: RunRecord, *, traces: tuple[str, ...] = (), n_steps: int | None = None) -> str:
    """The card as YAML."""
    card = card_of(run, traces=traces, n_steps=n_steps)
    return yaml.safe_dump(card, sort_keys=False, allow_unicode=True, width=100)


def card_of(
    run: RunRecord, *, traces: tuple[str, ...] = (), n_steps: int | None = None
) -> dict[str, Any]:
    """The card; `traces` are the kinds of traces next to it, with `n_steps` steps in all.

    SpecError if a value of the run does not fit the template.
    """
    experiment = run.manifest.experiment
    if experiment.topology is None:
        raise SpecError("the run does not make a workload card: its slice is not known.")
    if n_steps is None and run.measured is not None:
        n_steps = sum(run.measured.n_profiled_steps.values()) or None
    places = experiment.topology, experiment.architecture, experiment.workload
    facts = _Facts(run, experiment, *places, traces, n_steps)
    card = _printable({**_filled(FIELDS, facts), "meshscope": _extra_fields(run)})
    faults = list(faults_of(card))
    if faults:
        raise SpecError(f"the run does not make a workload card: {'; '.join(faults)}.")
    return card


def _filled(fields: Fields, facts: _Facts) -> dict[str, Any]:
    return {
        name: field.value(facts) if isinstance(field, Field) else _filled(field, facts)
        for name, field in fields.items()
    }


def _extra_fields(run: RunRecord) -> dict[str, Any]:
    experiment, manifest = run.manifest.experiment.as_dict(), run.manifest
    workload = experiment.get("workload") or {}
    return {
        "source": manifest.source.value,
        "plan": experiment.get("plan"),
        "mesh": experiment.get("mesh"),
        "slice": experiment.get("topology"),
        "engine": experiment.get("engine"),
        "program": experiment.get("program"),
        "weight_dtype": workload.get("weight_dtype"),
        "cache_dtype": workload.get("cache_dtype"),
        "bandwidth_gbps": "scale-up: all links of a chip, one direction, published peak",
        "created": manifest.created,
        "command": manifest.command,
        "versions": manifest.versions,
    }


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable(str(name)): _printable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCard:
    """What a card says; None if it does not say, or in a form that cannot be used."""

    path: Path
    plan: Plan | None
    topology: Topology | None
    model_name: str | None
    n_devices: int | None
    traces: tuple[str, ...]  # kinds of traces next to it: json_tpu, json, nsys
    findings: tuple[str, ...]


def read_card(path: Path) -> WorkloadCard:
    """The card; SpecError if the file is not YAML of a card."""
    card = _document(path)
    findings: list[str] = []
    topology = _topology(card, findings)
    n_devices = _size(_at(card, "workload", "hardware", "xpu_spec", "total_count"))
    plan = _plan(card, topology, findings)
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
        model_name=hub[1] if (hub := _HUB.match(str(card.get("hf_url")))) else None,
        n_devices=n_devices if topology is None else topology.n_devices,
        traces=tuple(map(str, traces)) if isinstance(traces, list) else (),
        findings=tuple(findings),
    )


def is_card(path: Path) -> bool:
    """Whether a YAML file has the sections of a card."""
    try:
        return bool(_document(path))
    except SpecError:
        return False


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


def _at(card: Any, *keys: str) -> Any:
    for key in keys:
        card = card.get(key) if isinstance(card, dict) else None
    return card


def _size(value: Any) -> int | None:
    """A size of at least 1, also written as text."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _plan(card: Mapping[str, Any], topology: Topology | None, findings: list[str]) -> Plan | None:
    """The plan of the card; one that does not fill the slice is left out."""
    text = _at(card, "meshscope", "plan")
    if not isinstance(text, str):
        sizes = _at(card, "Model-executor", "model_plan_parallelization")
        if not isinstance(sizes, dict) or not sizes:
            return None
        known = ((axis, _size(sizes.get(key)) or 1) for key, axis in CARD_AXES.items())
        text = ",".join(f"{axis}={n}" for axis, n in known if n > 1) or "tp=1"
    # Then without ep: cards of others count experts' devices in several ways.
    without = ",".join(word for word in text.split(",") if not word.startswith("ep="))
    for attempt in dict.fromkeys([text, without or text]):
        try:
            plan = parse_plan(attempt)
            return plan if topology is None else plan.filled(topology.n_devices)
        except MeshscopeError as error:
            findings.append(f"the plan '{attempt}' of the card cannot be used: {error}")
    return None


def _topology(card: Mapping[str, Any], findings: list[str]) -> Topology | None:
    """`v6e:2x4` or `2xh100:8`, from the chip, the number of chips, and chips of a node."""
    name, spec = _at(card, "meshscope", "slice"), _at(card, "workload", "hardware", "xpu_spec")
    if not isinstance(name, str):
        model, total = _at(spec, "model"), _size(_at(spec, "total_count"))
        if not isinstance(model, str) or total is None:
            return None
        name = _topology_name(model, total, _size(_at(spec, "count_per_node")))
    try:
        return parse_topology(name, is_imported=True)
    except MeshscopeError as error:
        findings.append(f"the hardware of the card cannot be used: {error}")
        return None


def _topology_name(model: str, total: int, per_node: int | None) -> str:
    words = model.lower().replace("-", "_").split("_")
    others = {"nvidia", "tpu", "google", "sxm", "80gb"}
    chip_name = next((word for word in words if word not in others), model)
    try:
        chip = chip_of("tpu7x" if chip_name in {"v7x", "7x"} else chip_name, is_imported=True)
    except MeshscopeError:
        return f"{chip_name}:{total}"
    if chip.kind is ChipKind.TPU:
        return f"{chip.name}-{total * (2 if chip.name_counts_cores else 1)}"
    n_nodes = total // per_node if per_node and not total % per_node else 1
    return f"{f'{n_nodes}x' if n_nodes > 1 else ''}{chip.name}:{total // n_nodes}"
