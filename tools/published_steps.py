"""Published times of whole steps on real TPUs: the data for fitting and checking the closed form.

Every second row of a group (same model, plan and phase) is for the fit, the others are the holdout. Unseen rows
were read after both the form of the model and its constants were fixed; examined rows were unseen until their
errors led to changes of the form.
Prefill times follow from a published throughput: tokens over the rate. Decode times are medians; those of
servers contain the host. `host_ms` is an assumption of this project: the 4 ms that one chip's decode times
have in common at five batches and contexts. On four chips the host's share is unknown: a server may overlap
its host with the device, or wait for it. There `least_host_ms` is 0, the time of the device is a range, and
an error counts from the nearer end of it. The server of January 2026 waited for its host on four chips, so
its times there are only upper bounds ("bound"). The contexts of Llama-3.1-70B are the capacity of the cache, of which the
attention kernel reads what is filled; how much that is was not published.
"""

import csv
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from meshscope.cost.closed_form import plan_form
from meshscope.cost.predicted import evaluated
from meshscope.cost.rates import ChipEfficiency
from meshscope.events.enums import Phase
from meshscope.events.step_time import TimeEstimate
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Program
from meshscope.plans.workload import Workload

CSV = Path(__file__).with_suffix(".csv")


class Half(StrEnum):
    """What a row is for."""

    FITTED = "fitted"
    HOLDOUT = "holdout"
    BOUND = "bound"  # the published time is an upper bound of the device's
    UNFILLED = "unfilled"  # the published time is too short to read the whole cache
    EXAMINED = "examined"  # not fitted, but the form of the model was changed in view of them
    UNSEEN = "unseen"  # read after the form of the model and its constants were fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """One published step: its experiment, and the time of the device and the host together."""

    id: str
    group: str
    half: Half
    experiment: Experiment
    phase: Phase
    published_s: float
    host_s: float
    least_host_s: float
    source: str

    @property
    def chip(self) -> str:
        """The name of its chip."""
        return self.experiment.topology.chip.name

    @property
    def device_s(self) -> float:
        """Published time without the host's, or the least that is left where its share is unknown."""
        return self.published_s - self.host_s

    @property
    def most_device_s(self) -> float:
        """Published time without what the host takes for certain."""
        return self.published_s - self.least_host_s

    def nearest_s(self, seconds: float) -> float:
        """The time in the range of the device's that is nearest to `seconds`."""
        return min(max(seconds, self.device_s), self.most_device_s)

    def is_inside(self, time: TimeEstimate) -> bool:
        """Whether an interval contains the published time, or a part of its range."""
        return time.lower_s <= self.most_device_s and self.device_s <= time.upper_s


def published_steps() -> tuple[PublishedStep, ...]:
    """The rows of the CSV file, in order."""
    with CSV.open() as file:
        return tuple(_step(row) for row in csv.DictReader(file))


def _step(row: dict[str, str]) -> PublishedStep:
    return PublishedStep(
        id=row["id"],
        group=row["group"],
        half=Half(row["half"]),
        experiment=_experiment(row),
        phase=Phase(row["phase"]),
        published_s=float(row["published_ms"]) / 1e3,
        host_s=float(row["host_ms"] or 0) / 1e3,
        least_host_s=float(row["least_host_ms"] or row["host_ms"] or 0) / 1e3,
        source=row["source"],
    )


def _experiment(row: dict[str, str]) -> Experiment:
    return experiment_of(
        model=read_model(row["model"]),
        plan=parse_plan(row["plan"]),
        topology=parse_topology(row["topology"]),
        workload=Workload(
            batch=int(row["batch"]),
            prompt=int(row["prompt"]),
            output=int(row["output"]),
            weight_dtype=row["weight_dtype"],
            cache_dtype=row["cache_dtype"],
            prefill_chunk=int(row["chunk"]) if row["chunk"] else None,
        ),
        program=Program(dispatch=DispatchForm(row["dispatch"] or DispatchForm.AUTO)),
    )


def closed_time(step: PublishedStep, efficiency: ChipEfficiency | None = None) -> TimeEstimate:
    """Time of the step in closed form."""
    form = plan_form(step.experiment, step.phase, efficiency=efficiency)
    return evaluated(form, step.experiment.workload)[1]
