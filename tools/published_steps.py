"""Published times of whole steps on real TPUs: the data for fitting and checking the closed form.

Every second row of a kind (chip, phase, precision of the weights, dense or mixture), in the order of the file, is
for the fit, and the others judge. Rows that are kept apart do neither: upper bounds ("bound"), caches that were
not full ("unfilled"), and mixtures under software that was replaced long ago ("old").
Prefill times follow from a published throughput: tokens over the rate. Decode times are medians; those of
servers contain the host. `host_ms` is an assumption of this project: the 4 ms that one chip's decode times
have in common at five batches and contexts. On four chips the host's share is unknown: a server may overlap
its host with the device, or wait for it. There `least_host_ms` is 0, the time of the device is a range, and
an error counts from the nearer end of it. The server of January 2026 waited for its host on four chips, so
its times there are only upper bounds. The contexts of Llama-3.1-70B are the capacity of the cache, of which the
attention kernel reads what is filled; how much that is was not published. The cache of DeepSeek-R1 holds int8
keys and values of two heads and a rotary key, 576 B a token, layer and device: as many as a latent in int8, which
its rows have. `attention` is the version of the attention kernel with its blocks (queries x keys), by SGLang-JAX's
table of version 2, its default of version 3, and what compiled programs of vLLM 0.12 name.
`tp=2,ep=2` of sglang-jax runs on four chips: data-parallel attention over pairs, and the experts
over all four.
"""

import csv
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

from meshscope.cost.closed_form import plan_form
from meshscope.cost.paged import VLLM, PagedBlocks
from meshscope.cost.predicted import evaluated
from meshscope.cost.rates import ChipEfficiency
from meshscope.events.enums import Phase
from meshscope.events.step_time import TimeEstimate
from meshscope.hardware.topology import parse_topology
from meshscope.model.config import read_model
from meshscope.model.model import Model
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Program
from meshscope.plans.workload import Workload

CSV = Path(__file__).with_suffix(".csv")


class Half(StrEnum):
    """What a row is for."""

    FITTED = "fitted"
    JUDGING = "judging"
    BOUND = "bound"  # the published time is an upper bound of the device's
    UNFILLED = "unfilled"  # the published time is too short to read the whole cache
    OLD = "old"  # software that was replaced long ago


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedStep:
    """One published step: its experiment, and the time of the device and the host together."""

    id: str
    half: Half
    experiment: Experiment
    phase: Phase
    published_s: float
    host_s: float
    least_host_s: float
    source: str
    blocks: str | PagedBlocks

    @property
    def chip(self) -> str:
        """The name of its chip."""
        return self.experiment.topology.chip.name

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """Chip, phase, precision of the weights, and whether the model has experts."""
        model = "dense" if self.experiment.model.moe is None else "mixture of experts"
        return self.chip, self.phase.value, self.experiment.workload.weight_dtype, model

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

    def error_of(self, seconds: float) -> float:
        """A time over the published one, minus 1; over the nearer end of a range."""
        return seconds / self.nearest_s(seconds) - 1

    def is_inside(self, time: TimeEstimate) -> bool:
        """Whether an interval contains the published time, or a part of its range."""
        return time.lower_s <= self.most_device_s and self.device_s <= time.upper_s


@cache
def published_steps() -> tuple[PublishedStep, ...]:
    """The rows of the CSV file, in order, halved by `PublishedStep.kind`."""
    with CSV.open() as file:
        rows = list(csv.DictReader(file))
    n_of_kind: Counter[tuple[str, ...]] = Counter()
    steps: list[PublishedStep] = []
    for row in rows:
        step = _step(row)
        if not row["kept_apart"]:
            is_fitted = n_of_kind[step.kind] % 2 == 0
            step = replace(step, half=Half.FITTED if is_fitted else Half.JUDGING)
            n_of_kind[step.kind] += 1
        steps.append(step)
    return tuple(steps)


def _step(row: dict[str, str]) -> PublishedStep:
    return PublishedStep(
        id=row["id"],
        half=Half(row["kept_apart"] or Half.JUDGING),
        experiment=_experiment(row),
        phase=Phase(row["phase"]),
        published_s=float(row["published_ms"]) / 1e3,
        host_s=float(row["host_ms"] or 0) / 1e3,
        least_host_s=float(row["least_host_ms"] or row["host_ms"] or 0) / 1e3,
        source=row["source"],
        blocks=_blocks(row["attention"]),
    )


def _blocks(text: str) -> str | PagedBlocks:
    """Blocks such as `sglang-v2 128x2048`: the version of the attention kernel, queries and keys."""
    if not text:
        return VLLM  # in decode, which has no blocks of queries
    version, _, sizes = text.partition(" ")
    queries, keys = map(int, sizes.split("x"))
    return PagedBlocks(queries=queries, keys=keys, version=version)


def _model(name: str) -> Model:
    """A model of the catalog, or of a config beside this file, whose name says its id."""
    path = CSV.parent / name
    if path.suffix != ".json":
        return read_model(name)
    return replace(read_model(str(path)), name=path.stem.replace("--", "/"))


def _experiment(row: dict[str, str]) -> Experiment:
    return experiment_of(
        model=_model(row["model"]),
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
    form = plan_form(step.experiment, step.phase, efficiency=efficiency, attention=step.blocks)
    return evaluated(form, step.experiment.workload)[1]
