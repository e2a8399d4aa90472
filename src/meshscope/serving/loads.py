"""Servers under several loads: throughput against latency of each plan, the knee, and the best plan by load."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, lcm

import numpy as np

from meshscope.analysis.request import RequestCost, are_equal, request_cost
from meshscope.cost.predicted import has_figures, predicted_times
from meshscope.errors import SpecError, read_only
from meshscope.events.enums import Phase
from meshscope.hardware.interconnect.profile import ChipProfile
from meshscope.plans.experiment import Experiment
from meshscope.plans.workload import Workload
from meshscope.serialize import picked
from meshscope.serving.engine import EnginePool
from meshscope.serving.load import Load, random_load
from meshscope.serving.objective import Objective, pareto_front
from meshscope.serving.placed import place_of
from meshscope.serving.search import step_gains
from meshscope.serving.servers import ServingEngine, serving_engine
from meshscope.serving.simulation import PlacedPool, RequestFigures, load_figures
from meshscope.store.run import ServedFigures
from meshscope.units import decimal_number, whole_number

MAX_LOADS = 64
N_MEASUREMENTS = 3
REQUESTS_IN_FLIGHT = 10  # requests for each that is in flight, as InferenceX has
MIN_REQUESTS = 64


def requests_of(concurrency: float) -> int:
    """Requests of a closed loop with so many in flight."""
    return max(MIN_REQUESTS, REQUESTS_IN_FLIGHT * ceil(concurrency))


def closed_load(concurrency: float, workload: Workload) -> Load:
    """The requests of a closed loop with so many in flight, of the lengths of a workload."""
    sizes = picked(workload, "prompt", "output")
    return random_load(1.0, rate_per_s=None, n_requests=requests_of(concurrency), **sizes)


def parse_loads(
    text: str | None, flag: str, *, least: float, most: float, is_whole: bool = False
) -> tuple[float, ...]:
    """The loads of `4`, `1,4,16`, `1:50` (doubled up to the last) or `1:50:5`; SpecError for anything else."""
    if text is None:
        return ()
    number = whole_number if is_whole else decimal_number
    loads: list[float] = []
    is_bad = False
    try:
        for item in str(text).split(","):
            first, *rest = (number(word.strip()) for word in item.split(":"))
            last, step = (*rest, None, None)[:2]
            loads.append(first)
            while last is not None and loads[-1] < last and len(loads) <= MAX_LOADS:
                loads.append(min(loads[-1] * 2 if step is None else loads[-1] + step, last))
            is_bad |= len(rest) > 2 or (last is not None and last < first)
            is_bad |= step is not None and step <= 0
    except ValueError:
        is_bad = True
    if is_bad or min(loads) < 0:
        example = "1:256 or 1,8,64" if is_whole else "1:50, 1:50:5 or 1,5,10"
        raise SpecError(
            f"{flag} '{text}' is neither a number, a list nor a range. Use for example 4, {example}."
        )
    for load in loads:
        if not least <= load <= most:
            raise SpecError(
                f"{flag} '{text}': {load:g} is out of range. Use {least:g} to {most:,.10g}."
            )
    if len(loads) > MAX_LOADS:
        raise SpecError(
            f"{flag} '{text}' has more than {MAX_LOADS} loads. Use a larger step, or none, which doubles."
        )
    return tuple(sorted(set(loads)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """A plan under one load: requests per second, or requests in flight, and what is served."""

    load: float
    n_requests: int
    figures: RequestFigures

    @property
    def latency_s(self) -> float:
        """The mean time of a request."""
        assert self.figures.e2e is not None  # every request of a load is served
        return self.figures.e2e.mean_s

    @property
    def n_in_flight(self) -> float:
        """The mean number of requests in flight (Little's law)."""
        return self.figures.requests_per_s * self.latency_s


@read_only
@dataclass(frozen=True, kw_only=True)  # without slots, so that it keeps what it derives
class LoadCurve:
    """A plan under rising loads."""

    placed: PlacedPool
    points: tuple[LoadPoint, ...]

    @property
    def plan(self) -> str:
        """The plan, such as `dp=8,ep=8`."""
        return str(self.placed.experiment.plan)

    @cached_property
    def knee(self) -> LoadPoint:
        """The load with the most throughput per latency, beyond which latency grows faster.

        Source: Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in computer
        communications" (ICC 1979): power is throughput over the mean time in the system.
        """
        return max(self.points, key=lambda one: one.figures.output_tokens_per_s / one.latency_s)

    def cost(self, at: int, profile: ChipProfile | None) -> RequestCost:
        """Server seconds per request at a load, with the relative error of the predicted steps.

        Communication over different axes has errors of its own here. Time of the host, padding and waiting are
        taken to be in proportion to the activities of the device.
        """
        point, experiment = self.points[at], self.placed.experiment
        sized = with_batch(experiment, point.n_in_flight, experiment.plan.data_size)
        n_decode, times = sized.workload.n_decode_steps, predicted_times(sized, profile)
        cost = request_cost(times, n_decode_steps=n_decode, chip=experiment.topology.chip.name)
        scale = 1 / point.figures.requests_per_s / cost.seconds.value_s
        seconds = defaultdict[str, float](float)
        for time in times:
            for spent in time.activities:
                n = n_decode if time.phase is Phase.DECODE else 1
                seconds[f"{spent.activity} over {spent.axis}"] += scale * n * spent.seconds
        return replace(cost, seconds=cost.seconds * scale, activities=seconds)


def with_batch(experiment: Experiment, n_sequences: float, multiple: int) -> Experiment:
    """The experiment with at least so many sequences, and whole prompts."""
    batch = multiple * max(1, ceil(n_sequences / multiple))
    return replace(
        experiment, workload=replace(experiment.workload, batch=batch, prefill_chunk=None)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """All plans at one load, the best first; the first `n_equal` after it equal it within their intervals.

    `why` says what the best one saves over the next on the device.
    """

    load: float
    ranked: tuple[tuple[str, LoadPoint], ...]
    n_equal: int = 0
    why: str | None = None

    @property
    def best(self) -> LoadPoint:
        """The best plan's point."""
        return self.ranked[0][1]

    @property
    def ahead_frac(self) -> float | None:
        """How much more than the second plan the best one serves; None if there is no other."""
        if len(self.ranked) < 2:
            return None
        first, second = (one.figures.output_tokens_per_s for _, one in self.ranked[:2])
        return first / second - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Benchmarks of two plans at one load, which would say which is better, and their chip seconds."""

    load: float
    plans: tuple[str, str]
    n_requests: int
    chip_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """A plan at a load: output tokens per second that a user sees (1 / TPOT p50), and of the slice per chip."""

    plan: str
    load: float
    tokens_per_s_per_user: float
    tokens_per_s_per_chip: float


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTable:
    """Plans under the same loads. `left_out` are plans that cannot serve them, with the reason."""

    curves: tuple[LoadCurve, ...]
    rows: tuple[LoadRow, ...]
    objective: Objective
    is_closed: bool  # loads are requests in flight, not requests per second
    server: ServingEngine | None
    left_out: Mapping[str, str]

    @property
    def winner(self) -> LoadCurve:
        """The plan that is best at the most loads."""
        names = [row.ranked[0][0] for row in self.rows]
        return max(self.curves, key=lambda curve: names.count(curve.plan))

    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The points that no other beats both for a user and per chip, the fastest for a user first."""
        points = [
            FrontierPoint(
                plan=curve.plan,
                load=one.load,
                tokens_per_s_per_user=1 / one.figures.tpot.p50_s,
                tokens_per_s_per_chip=one.figures.output_tokens_per_s / curve.placed.n_chips,
            )
            for curve in self.curves
            for one in curve.points
            if one.figures.tpot is not None
        ]
        slowness = [(-p.tokens_per_s_per_user, -p.tokens_per_s_per_chip, 0.0) for p in points]
        return tuple(points[row] for row in pareto_front(np.reshape(slowness, (-1, 3))))

    def measurements(self) -> tuple[Measurement, ...]:
        """The cheapest benchmarks that would settle which of two equal plans is better."""
        pairs: list[Measurement] = []
        for row in (row for row in self.rows if row.n_equal):
            (first, one), (second, other) = row.ranked[:2]
            seconds = sum(p.n_requests / p.figures.requests_per_s for p in (one, other))
            pairs.append(
                Measurement(
                    load=row.load,
                    plans=(first, second),
                    n_requests=one.n_requests,
                    chip_s=seconds * self.curves[0].placed.n_chips,
                )
            )
        return tuple(sorted(pairs, key=lambda one: one.chip_s)[:N_MEASUREMENTS])


def load_table(  # noqa: PLR0913  the plans and the loads
    placed: Sequence[PlacedPool],
    loads: Sequence[float],
    load_of: Callable[[float], Load],
    objective: Objective,
    *,
    is_closed: bool,
    server: ServingEngine | None = None,
    profile: ChipProfile | None = None,
    left_out: Mapping[str, str] | None = None,
) -> LoadTable:
    """Each plan under each of the loads, of which `load_of` has the requests."""
    requests = [load_of(one) for one in loads]

    def point(pool: EnginePool, one: float, load: Load) -> LoadPoint:
        limit = int(one) if is_closed else None
        figures = load_figures(load, pool, objective, max_concurrency=limit)
        return LoadPoint(load=one, n_requests=load.n_requests, figures=figures)

    curves = [
        LoadCurve(
            placed=one,
            points=tuple(point(one.pool, *pair) for pair in zip(loads, requests, strict=True)),
        )
        for one in placed
    ]
    return LoadTable(
        curves=tuple(curves),
        rows=load_rows(curves, objective, profile),
        objective=objective,
        is_closed=is_closed,
        server=server,
        left_out=left_out or {},
    )


def sharding_table(
    experiments: Iterable[Experiment],
    concurrencies: Sequence[float],
    objective: Objective,
    *,
    server: ServingEngine | None,
    profile: ChipProfile | None = None,
) -> LoadTable:
    """The plans that a serving engine can express, each with so many requests in flight."""
    placed, left_out = list[PlacedPool](), dict[str, str]()
    for one in expressible(experiments):
        try:
            placed.append(place_of(one, server, profile=profile).pool(one.workload.context))
        except SpecError as error:
            left_out[str(one.plan)] = str(error)
    if not placed:
        raise SpecError(
            " ".join(dict.fromkeys(left_out.values())) or "no plan of tp, dp and ep fills the slice"
        )
    return load_table(
        placed,
        concurrencies,
        lambda one: closed_load(one, placed[0].experiment.workload),
        objective,
        is_closed=True,
        server=server,
        profile=profile,
        left_out=left_out,
    )


def served_figures(
    experiment: Experiment, server: str, profile: ChipProfile | None = None
) -> ServedFigures:
    """What a serving engine delivers with the batch of the experiment in flight.

    SpecError for an unknown engine, a chip without figures, or weights that leave no room for a cache.
    """
    chip, engine = experiment.topology.chip, serving_engine(server)
    if not has_figures(chip, profile):
        raise SpecError(
            f"--server simulates times, which {chip.name} has no published rates for. Give a --profile, or drop "
            "the option."
        )
    placed = place_of(experiment, engine, profile=profile).pool(experiment.workload.context)
    return placed_figures(placed, experiment.workload, str(engine))


def placed_figures(placed: PlacedPool, workload: Workload, server: str) -> ServedFigures:
    """What the placed engine delivers with the batch of the workload in flight."""
    load = closed_load(workload.batch, workload)
    figures = load_figures(load, placed.pool, Objective(), max_concurrency=workload.batch)
    assert figures.ttft is not None  # every request is served
    n_engines, blocks = placed.pool.n_engines, placed.pool.blocks
    return ServedFigures(
        server=server,
        n_in_flight=workload.batch,
        ttft_s=figures.ttft.p50_s,
        tpot_s=None if figures.tpot is None else figures.tpot.p50_s,
        output_tokens_per_s=figures.output_tokens_per_s,
        n_cache_tokens=n_engines * blocks.n_tokens,
        n_fitting=n_engines * (blocks.n_blocks // blocks.of(workload.context)),
    )


def load_rows(
    curves: Sequence[LoadCurve], objective: Objective, profile: ChipProfile | None
) -> tuple[LoadRow, ...]:
    """The plans at each load by goodput if the objective has limits, else by output tokens per second."""

    def worth(item: tuple[int, LoadPoint]) -> tuple[float, float]:
        figures = item[1].figures
        served = figures.output_tokens_per_s
        return (figures.goodput_per_s, served) if objective.has_limits else (served, served)

    rows: list[LoadRow] = []
    for at in range(len(curves[0].points)):
        points = [(i, curve.points[at]) for i, curve in enumerate(curves)]
        ranked = sorted(points, key=worth, reverse=True)
        costs = [curves[i].cost(at, profile) for i, _ in ranked] if len(ranked) > 1 else []
        equal = [are_equal(costs[0], cost) for cost in costs[1:]]
        best, *others = (curves[i].placed.experiment for i, _ in ranked)
        why = None
        if others:
            multiple = lcm(best.plan.data_size, others[0].plan.data_size)
            n_in_flight = ranked[0][1].n_in_flight
            mine, other = (with_batch(one, n_in_flight, multiple) for one in (best, others[0]))
            clauses = ", ".join(step_gains(mine, other, profile).clauses)
            head = f"over '{others[0].plan}', a batch of {mine.workload.batch}"
            why = f"{head} {clauses or 'takes the same time'}"
        rows.append(
            LoadRow(
                load=points[0][1].load,
                ranked=tuple((curves[i].plan, point) for i, point in ranked),
                n_equal=(*equal, False).index(False),
                why=why,
            )
        )
    return tuple(rows)


def expressible(plans: Iterable[Experiment]) -> list[Experiment]:
    """The plans that serving engines have flags for: tp and dp, and ep over all devices or none."""
    return [
        one
        for one in plans
        if one.plan.pp == one.plan.cp == one.plan.fsdp == 1
        and not one.plan.sp
        and one.plan.ep in {1, one.plan.n_devices}
    ]
