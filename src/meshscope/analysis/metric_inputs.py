"""What metrics are computed from: the event table and what stands beside it, of one run."""

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
    """The time of one step of a phase, by one source, and what it rests on."""

    source: Source
    phase: Phase
    step_s: float
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInputs:
    """A run as metrics see it; what is None or empty is not known.

    `events` has the columns of the event table, `timeline` too: one row for each execution, compute and
    copies among them. `n_microbatches` is by phase, for plans with a pipeline.
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
