"""The inputs of all metrics: the event table of one run and everything else known about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from meshscope.analysis.latency import Latency
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.step_time import StepTime
from meshscope.spec.hardware.topology import Topology
from meshscope.spec.model.model import Model
from meshscope.spec.plan.memory import Memory
from meshscope.spec.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDuration:
    """Seconds of one step of a phase, by one source, with the basis of the time."""

    source: Source
    phase: Phase
    step_s: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInputs:
    """A run as metrics read it; null or empty means unknown.

    `events` and `timeline` have the columns of the event table. A row of `timeline` is one execution of
    a collective, a compute op or a copy. `n_microbatches` maps the phases of a pipelined plan to their
    number of microbatches.
    """

    events: pl.DataFrame
    timeline: pl.DataFrame | None = None
    topology: Topology | None = None
    n_devices: int | None = None
    n_stages: int = 1
    n_microbatches: Mapping[Phase, int] = field(default_factory=dict[Phase, int])
    model: Model | None = None
    workload: Workload | None = None
    memory: Mapping[Source, Memory] = field(default_factory=dict[Source, Memory])
    steps: tuple[StepDuration, ...] = ()
    times: tuple[StepTime, ...] = ()
    measured: Measured | None = None
    latency: Latency | None = None

    @property
    def measured_step_s(self) -> dict[Phase, float]:
        """Measured seconds of a step of each phase."""
        return {s.phase: s.step_s for s in self.steps if s.source is Source.MEASURED}
