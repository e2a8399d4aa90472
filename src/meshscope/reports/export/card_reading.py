"""Reads CCL-Bench workload cards: the plan, the slice and the model of a folder of traces.

A card of others may lack fields, hold text for numbers, or describe a plan that its hardware
cannot have. What cannot be used is a finding, and the field stays unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshscope.errors import MeshscopeError, SpecError
from meshscope.files import read_file
from meshscope.hardware.chips import ChipKind, chip_of
from meshscope.hardware.topology import NAMES_COUNT_CORES, Topology, parse_topology
from meshscope.plans.plan import Plan, parse_plan
from meshscope.reports.export.schema import CARD_AXES, faults_of

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
        return f"{chip.name}-{total * (2 if chip.name in NAMES_COUNT_CORES else 1)}"
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
