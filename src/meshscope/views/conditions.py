"""The conditions of a run, printed above its figures: what was asked, of which slice, with what."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from meshscope.store.run import RunRecord
from meshscope.views.plain import short

MAX_VALUE = 4000  # characters of a condition, such as the flags of a compiler


def conditions(run: RunRecord) -> Table:
    """One line a condition."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in condition_lines(run):
        table.add_row(name, Text(short(value, MAX_VALUE)))
    return table


def condition_lines(run: RunRecord) -> list[tuple[str, str]]:
    """Names and values of the conditions that the run knows."""
    asked = run.manifest.experiment
    lines = [
        ("model", _model(asked.get("model"))),
        ("slice", f"{asked['topology']}, {asked['n_chips']} chips, {asked['n_devices']} devices"),
        ("plan", f"{asked['plan']} on the mesh ({_pairs(asked['mesh'])})"),
        ("request", _request(asked.get("workload"))),
        ("program", _program(asked)),
        ("kernels", _kernels(asked)),
        ("versions", _pairs(run.manifest.versions, separator=" ")),
        ("flags", _pairs(run.manifest.flags)),
        ("run", "" if run.path is None else str(run.path)),
    ]
    return [(name, value) for name, value in lines if value]


def _pairs(values: Mapping[str, Any], separator: str = "=") -> str:
    return ", ".join(f"{name}{separator}{value}" for name, value in values.items())


def _model(model: Mapping[str, Any] | None) -> str:
    return "" if model is None else f"{model['name']}, {model['n_layers']} layers"


def _request(workload: Mapping[str, Any] | None) -> str:
    if workload is None:
        return ""
    sizes = ", ".join(f"{name} {workload[name]}" for name in ("batch", "prompt", "output"))
    dtypes = {
        "weights": workload["weight_dtype"],
        "activations": workload["activation_dtype"],
        "cache": workload["cache_dtype"],
    }
    return f"{sizes}; {_pairs(dtypes, separator=' ')}"


def _program(asked: Mapping[str, Any]) -> str:
    if "imported" in asked:
        return f"imported from {', '.join(asked['imported'])}"
    program = asked["program"]
    if asked["engine"] != "meshscope":
        return f"{asked['engine']}'s conventions"
    words = f"{program['frontend']}, {program['partitioner']} partitioner"
    layers = f", layers {asked['layers_are']}" if "layers_are" in asked else ""
    across = (
        f", {asked.get('context') or program.get('context', 'ring')} over cp"
        if "cp" in asked["mesh"]
        else ""
    )
    return f"{words}{layers} (--loop {program['loop']}){across}{_microbatches(asked)}"


def _kernels(asked: Mapping[str, Any]) -> str:
    """Which way each part of our own program takes."""
    if "program" not in asked or asked["engine"] != "meshscope":
        return ""
    return "; ".join(
        f"{part.replace('_', ' ')}: {way}" for part, way in asked.get("kernels", {}).items()
    )


def _microbatches(asked: Mapping[str, Any]) -> str:
    """How many parts of the batch follow each other through a pipeline."""
    if asked["mesh"].get("pp", 1) == 1 or "microbatches" not in asked:
        return ""
    n = asked["microbatches"]["prefill"]
    return f"; {n} micro-batch{'es' if n > 1 else ''} in prefill"
