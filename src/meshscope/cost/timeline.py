"""Stores the simulated step of a compiled run as a folded timeline of one device, or one of each stage.

Lanes are `core` (compute, by part), `collective` and `copy`; each step starts at 0.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from meshscope.cost.machine import LINK_LANE, Span
from meshscope.cost.steps import TimedStep
from meshscope.events.enums import Phase, Source
from meshscope.events.timeline import FOLDED_SCHEMA, TIMELINE, repetition_starts
from meshscope.readers.hlo.attribution import Scope, plain_name, scope_of
from meshscope.readers.hlo.collectives import with_stage_send
from meshscope.readers.hlo.operations import source_ops_of


def timeline_table(steps: Iterable[TimedStep]) -> pl.DataFrame:
    """One row per span and pipeline stage, by FOLDED_SCHEMA."""
    records = [record for step in steps for record in _StepSpans(step).records()]
    return pl.DataFrame(records, schema=FOLDED_SCHEMA, orient="row")


def write_timeline(folder: Path, steps: Iterable[TimedStep]) -> None:
    """Writes `timeline.parquet` into a run folder."""
    timeline_table(steps).write_parquet(folder / TIMELINE)


class _StepSpans:
    def __init__(self, step: TimedStep) -> None:
        self.step = step
        devices = step.module_collectives.devices
        self.n_stages = devices.mesh.size("pp")
        instructions = (i for c in devices.module.computations.values() for i in c.instructions)
        self.op_names = {i.name: i.op_name for i in instructions}
        self.exposed_s = _mean_exposed_s(step)

    def records(self) -> Iterator[tuple[Any, ...]]:
        """One record for each span and stage."""
        same: defaultdict[tuple[Any, ...], list[Span]] = defaultdict(list)
        placed: list[tuple[Span, Scope, int | None]] = []
        for span in self.step.simulated.spans:
            scope = self._scope(span)
            of_all = scope.stages or () if span.task.lane == LINK_LANE else ()
            for stage in span.stages or tuple(of_all) or (None,):
                placed.append((span, scope, stage))
                same[self._same(span, stage)].append(span)
        layers: dict[tuple[Any, ...], list[list[int]]] = {}
        for span, scope, stage in placed:
            key = self._same(span, stage)
            if key not in layers:
                layers[key] = self._layers(same[key], scope, stage)[::-1]
            yield self._record(span, scope, stage, layers[key].pop())

    def _same(self, span: Span, stage: int | None) -> tuple[Any, ...]:
        """What executions of one operation in all layers of a stage have in common."""
        op_name = plain_name(self.op_names.get(span.task.name))
        return span.task.lane, op_name or span.task.name, stage

    def _scope(self, span: Span) -> Scope:
        name, collectives = span.task.name, self.step.simulated.collectives
        if span.task.lane != LINK_LANE:
            return scope_of(self.op_names.get(name))
        first, mesh = collectives[name].operations[0], self.step.module_collectives.devices.mesh
        scope = with_stage_send(first.scope, first.kind, self.step.axes[name], mesh)
        is_known = scope.stages is None or scope.stages[-1] < self.n_stages
        return scope if is_known else replace(scope, stages=None)

    def _layers(self, spans: Sequence[Span], scope: Scope, stage: int | None) -> list[list[int]]:
        """The layers of each span, whose repetitions have them in turn; [] if unknown."""
        if not scope.layers:
            return [[] for _ in spans]
        if self.step.layers is not None:
            (first, *_), layers = scope.layers, self.step.layers
            times = [span.repeats[0][0] if span.repeats else 1 for span in spans]
            return [layers.layers_of(first, n) for n in times]
        number = stage - scope.stages[0] if scope.stages and stage is not None else 0
        of_stage = np.array(scope.layers) + number * scope.stage_layers
        if len(of_stage) == 1:
            return [of_stage.tolist() for _ in spans]
        starts = [repetition_starts(span.start_s, span.repeats) for span in spans]
        n_executions = sum(map(len, starts))
        n_each, rest = divmod(n_executions, len(of_stage) * scope.n_microbatches)
        if rest:
            return [[] for _ in spans]
        ranks = np.empty(n_executions, int)
        ranks[np.argsort(np.concatenate(starts), kind="stable")] = np.arange(n_executions)
        executed = of_stage[ranks // n_each % len(of_stage)]
        parts = np.split(executed, np.cumsum([len(of_span) for of_span in starts])[:-1])
        return [part[:1].tolist() if (part == part[0]).all() else part.tolist() for part in parts]

    def _record(
        self, span: Span, scope: Scope, stage: int | None, layers: list[int]
    ) -> tuple[Any, ...]:
        name, step = span.task.name, self.step
        is_collective = span.task.lane == LINK_LANE
        part, basis = (scope.part, "interconnect_model") if is_collective else span.task.key[2:]
        cost = None if is_collective else step.simulated.op_costs.get(name)
        repeats = (*step.repeats, *span.repeats)
        return (
            Source.COMPILED.value,
            Phase(step.time.phase).value,
            stage,
            span.task.lane,
            None if part is None else str(part),
            step.simulated.collectives[name].operations[0].kind.value if is_collective else None,
            step.axes[name] if is_collective else None,
            step.start_s + span.start_s,
            span.dur_s,
            self.exposed_s.get(name) if is_collective else None,
            layers or None,
            [times for times, _ in repeats],
            [period for _, period in repeats],
            str(basis),
            step.row_names.get(name, name),
            None if cost is None else cost.activity.value,
        )


def _mean_exposed_s(step: TimedStep) -> dict[str, float]:
    """Exposed seconds of one execution of each collective; equal for collectives in one row."""
    tally, means = step.simulated.machine.tally, dict[str, float]()
    merged = [source_ops_of([operation]) for operation in step.module_collectives.merged]
    for names in [*((name,) for name in step.simulated.collectives), *merged]:
        n, exposed_s = (
            sum(tally.get((what, (LINK_LANE, name)), 0.0) for name in names)
            for what in ("n", "exposed")
        )
        means |= dict.fromkeys(names, exposed_s / n) if n else {}
    return means
