"""CCL-Bench's workload card: the card of a run, and the cards of others.

Unknown and inapplicable values are null, never 0. In a card of others, what cannot be used is a finding, and the
field stays unknown.
"""

import re
from collections.abc import Mapping
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
from meshscope.hardware.chips import ChipKind, chip_of
from meshscope.hardware.topology import MAX_SINGLE_HOST, Topology, parse_topology
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.plans.plan import ALIASES, AXES, Plan, parse_plan
from meshscope.reports.charts.spec import filled, read_yaml
from meshscope.serialize import picked
from meshscope.store.run import RunRecord

CARD = "card.yaml"  # in a run folder
_HUB = re.compile(r".*?huggingface\.co/+([\w.-]+/[\w.-]+)")  # `meta-llama/Llama-3.1-8B`
_HUB_NAME = re.compile(r"[\w.-]*[^\W_][\w.-]*/[\w.-]*[^\W_][\w.-]*")
BITS_PER_BYTE = 8
MAX_CARD_BYTES = 1 << 20

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


def yaml_of(card: Mapping[str, Any]) -> str:
    """A card as YAML, in the order of the template."""
    return yaml.safe_dump(card, sort_keys=False, allow_unicode=True, width=100)


def card_of(
    run: RunRecord, *, traces: tuple[str, ...] = (), n_steps: int | None = None
) -> dict[str, Any]:
    """The card; `traces` are the kinds of traces next to it, with `n_steps` steps in all.

    SpecError if the slice is not known.
    """
    manifest, experiment = run.manifest, run.manifest.experiment
    topology, model, workload = experiment.topology, experiment.architecture, experiment.workload
    if topology is None:
        raise SpecError("the run does not make a workload card: its slice is not known.")
    if n_steps is None and run.measured is not None:
        n_steps = sum(run.measured.n_profiled_steps.values()) or None
    chip, is_tpu = topology.chip, topology.chip.kind is ChipKind.TPU
    name, dtype = experiment.model_name or "", workload and workload.activation_dtype
    # As in CCL-Bench: `tpu_v6e`.
    tpu_name = f"tpu_v{chip.name.removeprefix('tpu').removeprefix('v')}"
    per_node = topology.n_chips if chip.kind is ChipKind.CPU else chip.chips_per_host
    if chip.is_rented_singly and topology.n_hosts == topology.n_slices:
        per_node = MAX_SINGLE_HOST  # as in CCL-Bench
    links = chip.all_links_bytes_per_s
    link_gbps = None if links is None else links * BITS_PER_BYTE / 1e9
    driver, library, packages = _SOFTWARE[chip.kind]
    n_all, n_active, n_embedding = (None,) * 3 if model is None else n_parameters(model)
    stored = experiment.as_dict()
    values = {
        **{axis: _axis(experiment, axis) for axis in CARD_AXES.values()},
        **{key: stored.get(key) for key in ("plan", "mesh", "topology", "engine")},
        **dict.fromkeys(("batch", "prompt", "output", "weight_dtype", "cache_dtype")),
        **(stored.get("workload") or {}),
        **picked(manifest, "flags", "created", "command", "versions"),
        "program": name or "a program of unknown model",
        "layout": experiment.layout,
        "slice": topology.name,
        "how": _HOW[manifest.source],
        "hf_url": f"https://huggingface.co/{name}" if _HUB_NAME.fullmatch(name) else None,
        "moe": model and model.moe is not None,
        "family": model and model.name.rsplit("/", 1)[-1].lower(),
        "precision": dtype and _PRECISIONS.get(dtype, dtype),
        "n_steps": n_steps,
        "n_parameters": n_all,
        "n_active_parameters": n_active,
        "n_embedding_parameters": n_embedding,
        "n_layers": model and model.n_layers,
        "n_heads": model and model.attention.query_heads(model.layers[0].attention),
        "head_dim": model and model.attention.head_widths[0],
        "dataset": _dataset(run),
        "network": _network(topology),
        "link_gbps": link_gbps,
        "chip_kind": chip.kind.value.upper(),
        "chip": tpu_name if is_tpu else chip.name,
        "n_chips": topology.n_chips,
        "chips_per_node": per_node if is_tpu else min(per_node, topology.n_chips),
        "driver": _version(run, driver),
        "frontend": experiment.program and experiment.program.frontend.value,
        "compiler": "xla" if is_tpu or experiment.program else None,
        "microbatch": _microbatch(experiment),
        "library": library,
        "library_version": _version(run, packages),
        "protocols": ["ici", "dcn"][: topology.n_slices] if is_tpu else [],
        "traces": traces,
        "source": manifest.source.value,
        "settings": stored.get("program"),
    }
    return _printable(filled(read_yaml("export/card.yaml"), values))


def _dataset(run: RunRecord) -> str | None:
    if run.manifest.experiment.imported is not None:
        return None
    if run.measured is None:
        return "none: shapes only, no program was run"
    return "one prompt of text" if run.measured.texts else "random tokens"


def _network(topology: Topology) -> str:
    if topology.chip.kind is not ChipKind.TPU:
        return "NVLink" if topology.chip.kind is ChipKind.GPU else "memory of one host"
    slices = f"{topology.n_slices} slices over DCN, each " if topology.n_slices > 1 else ""
    return f"{slices}ICI torus {'x'.join(map(str, topology.grid))}"


def _version(run: RunRecord, packages: tuple[str, ...]) -> str | None:
    versions = run.manifest.versions
    return next((f"{name} {versions[name]}" for name in packages if name in versions), None)


def _axis(experiment: ExperimentRecord, axis: str) -> int | None:
    """Size of an axis of the plan; None for a mesh with axes of unknown meaning."""
    plan, mesh = experiment.plan, experiment.mesh
    if plan is not None:
        return getattr(plan, axis)
    meanings = {name: ALIASES.get(name, name) for name in mesh}
    is_known = set(meanings.values()) <= set(AXES)
    return prod(n for name, n in mesh.items() if meanings[name] == axis) if is_known else None


def _microbatch(experiment: ExperimentRecord) -> int | None:
    """Sequences per device in one microbatch of prefill; 1 without a pipeline."""
    plan, n = experiment.plan, experiment.microbatches.get(Phase.PREFILL)
    workload = experiment.workload
    if plan is None or plan.pp == 1 or n is None or workload is None:
        return 1 if plan is not None or _axis(experiment, "pp") == 1 else None
    return max(1, workload.batch // (plan.dp * plan.fsdp) // n)


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

    plan: Plan | None
    topology: Topology | None
    model_name: str | None
    findings: tuple[str, ...]


def read_card(path: Path) -> WorkloadCard:
    """The card; SpecError if the file is not YAML of a card."""
    card = _document(path)
    findings: list[str] = []
    topology = _topology(card, findings)
    plan = _plan(card, topology, findings)
    return WorkloadCard(
        plan=plan,
        topology=topology,
        model_name=hub[1] if (hub := _HUB.match(str(card.get("hf_url")))) else None,
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
