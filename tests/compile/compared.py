"""Compiles an experiment in a test, and what of its rows is compared."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from meshscope.backends.compile.compile import CompileResult, compile_experiment
from meshscope.cost.collectives import predict
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase
from meshscope.model.mechanisms.linear import Recurrent
from meshscope.plans.experiment import Experiment
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.lint.findings import lint_module
from meshscope.readers.lint.log import WASTE


def compiled(
    experiment: Experiment, directory: Path, phases: Sequence[Phase] | None = None
) -> CompileResult:
    return compile_experiment(experiment, directory, progress=lambda *_: None, phases=phases)


TILE_BYTES = 512  # 128 numbers of 32 bits, the least that moves between slices


def meanings(rows: list[Collective]) -> Counter[tuple[object, ...]]:
    """The compared fields of each row, with its executions per step; libtpu adds dimensions of 1 to some shapes."""
    counted: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        groups = frozenset(map(frozenset, row.groups))
        place = (row.phase, row.stage, row.layer, row.part, row.kind, row.axis, row.crosses_slices)
        shape = None if row.shape is None else tuple(size for size in row.shape if size != 1)
        wire = row.wire_bytes
        if row.crosses_slices and wire is not None:
            wire = max(wire, TILE_BYTES)
        sizes = (row.payload_bytes, wire)
        counted[(*place, groups, row.dtype, shape, *sizes, row.n_steps)] += row.count
    return counted


def assert_predicted_equals_compiled(
    experiment: Experiment, directory: Path, phases: Sequence[Phase] | None = None
) -> None:
    """Kind, count, shape, groups, payload and wire bytes of every collective, each of which has an axis.

    Lint has no alarm. One is possible: linear attention within the one chunk of a device of cp looks like attention
    to a device's own part.
    """
    result = compiled(experiment, directory, phases)

    predicted = [row for row in predict(experiment) if row.phase in (phases or experiment.phases)]
    assert meanings(predicted) == meanings(result.rows)
    assert [row.hlo_name for row in result.rows if row.axis_reason is not None] == []
    programs = [
        lint_module(read_hlo(path), experiment.mesh)
        for path in sorted(directory.glob("*.hlo.txt*"))
    ]
    assert programs
    findings = [one for program in programs for one in program.findings if one.kind not in WASTE]
    kinds = map(experiment.model.attention_of, experiment.model.layers)
    if experiment.plan.cp > 1 and any(isinstance(kind, Recurrent) for kind in kinds):
        findings = [one for one in findings if one.is_certain]
    assert [one.sentence for one in findings] == []
