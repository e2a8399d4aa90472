"""Latency and throughput of requests, with and without speculation, and whether the times of two sources agree.

Times are measured or modeled. The steps of two sources of a run are compared, and the requests of two runs.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from meshscope.analysis.roofline import BETWEEN_PARTS
from meshscope.errors import read_only
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.events.measured import Request
from meshscope.events.step_time import NO_TIME, StepTime, TimeBasis, TimeEstimate
from meshscope.plans.experiment import experiment_of_record
from meshscope.plans.plan import ALIASES, MESH_AXES
from meshscope.plans.speculation import Speculation, draft_memory_bytes
from meshscope.plans.workload import parse_lengths
from meshscope.serialize import picked
from meshscope.store.run import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and percentiles of `n` durations, in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Durations and rates of the timed requests; `latency_of` defines the durations.

    `itl`, `tpot` and `decode_tokens_per_s` are null if a request generates a single token. Rates describe
    the mean request and count the tokens of all sequences in the batch: `output_tokens_per_s` = output
    tokens / e2e, `prefill_tokens_per_s` = prompt tokens / ttft, `decode_tokens_per_s` = tokens after the
    first / (e2e - ttft).
    """

    ttft: Spread
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread
    output_tokens_per_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None

    @property
    def step_s(self) -> dict[Phase, float]:
        """Mean seconds of a step of each timed phase."""
        spreads = {Phase.PREFILL: self.ttft, Phase.DECODE: self.itl}
        return {phase: spread.mean_s for phase, spread in spreads.items() if spread is not None}


def latency_of(requests: Sequence[Request], *, batch: int, prompt: int) -> Latency:
    """TTFT, ITL, TPOT and end-to-end time of the timed requests, on the devices.

    `ttft` is the time from the start of a request to its first token (prefill). `itl` is the time from one
    token to the next, one value for each decode step. `tpot` = time after the first token / number of
    tokens after it, one value for each request. `e2e` is the time from the start to the last token.
    Queueing is excluded. Percentiles interpolate linearly (numpy's `linear`).

    Source: vLLM's benchmark (`vllm bench serve`), where TPOT = (latency - TTFT) / (output length - 1) and
    ITL is the list of gaps between tokens, both measured by a client.
    """
    ttft = spread_of(r.prefill_s for r in requests)
    e2e = spread_of(r.prefill_s + fsum(r.decode_s) for r in requests)
    steps = [step_s for r in requests for step_s in r.decode_s]
    n_decode_steps = len(steps) / len(requests)
    decode_s = e2e.mean_s - ttft.mean_s
    return Latency(
        ttft=ttft,
        itl=spread_of(steps) if steps else None,
        tpot=spread_of(fsum(r.decode_s) / len(r.decode_s) for r in requests) if steps else None,
        e2e=e2e,
        output_tokens_per_s=batch * (1 + n_decode_steps) / e2e.mean_s,
        prefill_tokens_per_s=batch * prompt / ttft.mean_s,
        decode_tokens_per_s=batch * n_decode_steps / decode_s if steps else None,
    )


def spread_of(durations_s: Iterable[float]) -> Spread:
    """Mean and percentiles of at least one duration."""
    every, levels = list(durations_s), (50, 90, 95, 99)
    values = np.percentile(every, levels).tolist()
    percentiles = {f"p{level}_s": value for level, value in zip(levels, values, strict=True)}
    return Spread(mean_s=fsum(every) / len(every), n=len(every), **percentiles)


ASSUMPTION = (
    "device time only, without host, queueing and tokenization; all sequences start together "
    "and all decode steps take the same time"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTime:
    """Durations of a request; null if the time of its steps is unknown.

    Modeled (see ASSUMPTION): `ttft` is the prefill step, which produces the first token; `tpot` and
    `decode_step` are the decode step; `e2e` is the prefill step plus all decode steps. Measured: means over
    the timed requests (`tpot`: per request; `decode_step`: per step). `step` is one execution of a program
    that is neither prefill nor decode. `basis` lists the sources of the
    time, joined by `+`, the largest share first.
    """

    ttft: TimeEstimate | None
    tpot: TimeEstimate | None
    e2e: TimeEstimate | None
    decode_step: TimeEstimate | None
    basis: str | None
    is_extrapolated: bool = False
    step: TimeEstimate | None = None


@read_only
@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates of the whole slice; null if a time is unknown.

    `decode_tokens_per_s` = batch / decode step: output tokens per second while all sequences decode.
    `output_tokens_per_s` = batch x output / end-to-end time, prefill included, and
    `requests_per_s` = batch / end-to-end time: one batch after the other, without overlap.
    """

    decode_tokens_per_s: float | None
    decode_tokens_per_s_per_chip: float | None
    output_tokens_per_s: float | None
    requests_per_s: float | None


def throughput_of(request: RequestTime, run: RunRecord) -> Throughput | None:
    """The rates of a request's times; None if the run does not know how many sequences decode.

    An imported run may know them from `--step-lengths`, but not how many tokens a request has.
    """
    experiment = run.manifest.experiment
    workload, n_chips, batch = experiment.workload, experiment.n_chips, None
    if workload is not None:
        batch = workload.batch
    elif experiment.lengths is not None:
        axes = {ALIASES.get(name, name): n for name, n in experiment.mesh.items() if n > 1}
        if axes.keys() <= set(MESH_AXES):  # else the data-parallel ranks are unknown
            lengths = parse_lengths(experiment.lengths)
            decoding = lengths.get(Phase.DECODE, lengths.get(None, ()))
            n_sequences = sum(s.n_sequences for s in decoding if s.n_queries == 1)
            batch = n_sequences * axes.get("dp", 1) * axes.get("fsdp", 1) or None
    if batch is None:
        return None

    def per_s(count: int, time: TimeEstimate | None) -> float | None:
        return count / time.value_s if time is not None and time.value_s else None

    decode_per_s = None if request.tpot is None else per_s(batch, request.decode_step)
    n_output = None if workload is None else batch * workload.output
    return Throughput(
        decode_tokens_per_s=decode_per_s,
        decode_tokens_per_s_per_chip=decode_per_s / n_chips if decode_per_s and n_chips else None,
        output_tokens_per_s=None if n_output is None else per_s(n_output, request.e2e),
        requests_per_s=per_s(batch, request.e2e),
    )


def request_times(run: RunRecord) -> dict[Source, RequestTime]:
    """The request time of every source that has one, the weakest source first."""
    latency, experiment = request_latency(run), run.manifest.experiment
    workload, model = experiment.workload, experiment.architecture
    n_decode_steps = None if workload is None else workload.n_decode_steps
    times = {
        source: modeled_request_time(times, n_decode_steps=n_decode_steps)
        for source in Source
        if (times := run.times_of(source))
    }
    spreads: dict[str, Spread | None] = {}
    if latency is not None:
        spreads = {**picked(latency, "ttft", "tpot", "e2e"), "decode_step": latency.itl}
    elif steps := step_spreads(run):  # a function has steps and no request
        decode = steps.get(Phase.DECODE)
        spreads = {"ttft": steps.get(Phase.PREFILL), "tpot": decode, "decode_step": decode}
        spreads |= {"step": steps.get(Phase.STEP), "e2e": None}
    if spreads:
        means = {
            name: None if one is None else TimeEstimate(value_s=one.mean_s, low_s=None, high_s=None)
            for name, one in spreads.items()
        }
        times[Source.MEASURED] = RequestTime(
            **means, basis=TimeBasis.MEASURED.value, is_extrapolated=False
        )
    # A step that verifies the tokens of a draft, or drafts them, yields no output tokens of its own.
    is_verification = workload is not None and workload.decode_tokens > 1
    if is_verification or (model is not None and model.draft_head is not None):
        return {source: replace(time, tpot=None) for source, time in times.items()}
    return times


def step_spreads(run: RunRecord) -> dict[Phase, Spread]:
    """Mean and percentiles of the timed steps of a function, by phase; empty for other runs."""
    steps = {} if run.measured is None else run.measured.step_s
    return {phase: spread_of(step_s) for phase, step_s in steps.items()}


def request_latency(run: RunRecord) -> Latency | None:
    """The latency of the run's timed requests; None if no request was timed."""
    workload = run.manifest.experiment.workload
    if run.measured is None or workload is None or not run.measured.requests:
        return None
    return latency_of(run.measured.requests, batch=workload.batch, prompt=workload.prompt)


def measured_step_s(run: RunRecord) -> dict[Phase, float]:
    """Mean seconds of a timed step of each phase; empty if no step was timed."""
    latency = request_latency(run)
    if latency is not None:
        return latency.step_s
    return {phase: spread.mean_s for phase, spread in step_spreads(run).items()}


def modeled_request_time(times: Iterable[StepTime], *, n_decode_steps: int | None) -> RequestTime:
    """The request whose phases take these step times.

    `e2e` is null if `n_decode_steps` is unknown.
    """
    by_phase = {time.phase: time for time in times}
    ttft, decode, step = (
        None if phase not in by_phase else by_phase[phase].step
        for phase in (Phase.PREFILL, Phase.DECODE, Phase.STEP)
    )
    e2e = None
    if ttft is not None and n_decode_steps is not None and (decode or not n_decode_steps):
        e2e = ttft + (decode * n_decode_steps if decode else NO_TIME)
    return RequestTime(
        ttft=ttft,
        tpot=decode,
        e2e=e2e,
        decode_step=decode,
        basis=basis_of(by_phase.values()),
        step=step,
        is_extrapolated=any(time.is_extrapolated for time in by_phase.values()),
    )


def basis_of(times: Iterable[StepTime]) -> str | None:
    """The sources of the steps' time, joined by `+`, the largest share first."""
    shares: defaultdict[str, float] = defaultdict(float)
    for time in times:
        step_s = time.step.value_s
        for basis, seconds in time.by_basis_s.items():
            shares[TimeBasis(basis).value] += seconds / step_s if step_s else 0
    return "+".join(sorted(shares, key=lambda name: -shares[name])) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeStep:
    """One step of speculative decoding by one source: the steps of the draft and one that verifies.

    `plain` is the decode step without speculation. `memory_bytes` is what the draft adds on a device;
    `fits` is None if unknown. The rows of each part are for one step.
    """

    source: Source
    speculation: Speculation
    verify: TimeEstimate
    draft: TimeEstimate
    plain: TimeEstimate
    verify_rows: tuple[Collective, ...]
    draft_rows: tuple[Collective, ...]
    memory_bytes: int
    fits: bool | None

    @property
    def step_s(self) -> float:
        """Seconds of a step: the drafts one after the other, then the verification."""
        return self.verify.value_s + self.speculation.n_passes * self.draft.value_s

    @property
    def tpot_s(self) -> float:
        """Seconds per output token of a sequence."""
        return self.step_s / self.speculation.tokens_per_step

    @property
    def gain(self) -> float:
        """Time per token without speculation over the time with it."""
        return self.plain.value_s / self.tpot_s


def speculative_steps(run: RunRecord) -> tuple[SpeculativeStep, ...]:
    """The step by each source that has its times, the weakest first; () for a run without speculation."""
    return tuple(step for source in Source if (step := _step(run, source)) is not None)


def _step(run: RunRecord, source: Source) -> SpeculativeStep | None:
    speculation, parts = run.manifest.speculation, run.speculative
    if speculation is None or parts is None:
        return None
    requests = [request_times(of).get(source) for of in (parts.verify, parts.draft, run)]
    verify, draft, plain = (None if one is None else one.decode_step for one in requests)
    if verify is None or draft is None or plain is None:
        return None
    memory_bytes = draft_memory_bytes(experiment_of_record(parts.draft.manifest.experiment))
    verify_rows, draft_rows = (
        tuple(row for row in of.rows_of(source) if row.phase is Phase.DECODE)
        for of in (parts.verify, parts.draft)
    )
    # The draft needs room on top of the model and its largest step, as compiled if it was.
    account = Source.COMPILED if source is Source.MEASURED else source
    memories = [of.memory[account] for of in (run, parts.verify) if account in of.memory]
    totals = [memory.total_bytes for memory in memories if memory.total_bytes is not None]
    hbm_bytes = memories[0].hbm_bytes if memories else None
    return SpeculativeStep(
        source=source,
        speculation=speculation,
        verify=verify,
        draft=draft,
        plain=plain,
        verify_rows=verify_rows,
        draft_rows=draft_rows,
        memory_bytes=memory_bytes,
        fits=None if hbm_bytes is None or not totals else max(totals) + memory_bytes <= hbm_bytes,
    )


SAME_FRAC = 0.005  # relative difference below which two times without intervals are equal
RESOLUTION_FRAC = 0.03  # and two modeled times: smaller differences are not resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChange:
    """Seconds of a share of a step, such as a part of the model or an activity, by two sources."""

    share: str
    left_s: float
    right_s: float

    @property
    def change_s(self) -> float:
        """Seconds by which the right source exceeds the left one."""
        return self.right_s - self.left_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAgreement:
    """The time of one step by two sources, and the changes of its shares, the largest first.

    `parts` have compute and exposed communication of each part of the model, with BETWEEN_PARTS for work
    that belongs to none; `activities` add up to the step. Both are () unless both sources know them.
    """

    phase: Phase
    left: TimeEstimate
    right: TimeEstimate
    parts: tuple[ShareChange, ...] = ()
    activities: tuple[ShareChange, ...] = ()

    @property
    def changes(self) -> tuple[ShareChange, ...]:
        """The changes by activity if known, else by part."""
        return self.activities or self.parts

    @property
    def is_within(self) -> bool:
        """Whether the intervals overlap; a time without an interval is a point."""
        return _overlap(self.left, self.right)

    @property
    def ratio(self) -> float:
        """The right time over the left time."""
        return self.right.value_s / self.left.value_s if self.left.value_s else float("inf")


def _overlap(left: TimeEstimate, right: TimeEstimate) -> bool:
    return left.lower_s <= right.upper_s and right.lower_s <= left.upper_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """Seconds of a request, and of each of its activities; {} if those are unknown.

    Costs with the same `basis`, a source and a chip, have the same relative error in an activity.
    """

    seconds: TimeEstimate
    activities: Mapping[str, float]
    basis: tuple[Source, str]

    def per(self, n: int) -> "RequestCost":
        """The cost of one of `n` equal parts."""
        activities = {name: seconds / n for name, seconds in self.activities.items()}
        return replace(self, seconds=self.seconds * (1 / n), activities=activities)


def request_cost(times: Iterable[StepTime], *, n_decode_steps: int, chip: str) -> RequestCost:
    """The cost of a request whose phases take these step times."""
    seconds, activities, sources = NO_TIME, defaultdict[str, float](float), set[Source]()
    for time in times:
        n = n_decode_steps if time.phase is Phase.DECODE else 1
        seconds += time.step * n
        for spent in time.activities:  # whatever the axis of communication
            activities[spent.activity.value] += n * spent.seconds
        sources.add(time.source)
    (source,) = sources
    return RequestCost(seconds=seconds, activities=activities, basis=(source, chip))


def request_cost_of(run: RunRecord, source: Source) -> RequestCost | None:
    """The cost of the request of a run, or of its only phase, by one source; None if it is unknown."""
    request, experiment = request_times(run).get(source), run.manifest.experiment
    chip = "" if experiment.chip is None else experiment.chip.name
    if source is not Source.MEASURED and experiment.workload is not None and run.times_of(source):
        n_steps = experiment.workload.n_decode_steps
        return request_cost(run.times_of(source), n_decode_steps=n_steps, chip=chip)
    seconds = None if request is None else request.e2e or request.ttft or request.tpot
    if seconds is None:
        return None
    return RequestCost(seconds=seconds, activities={}, basis=(source, chip))


def are_equal(left: RequestCost, right: RequestCost) -> bool:
    """Whether two requests take the same time within the errors that they do not share.

    Their intervals overlap. With the same basis, work common to both has the same error,
    which leaves the relative error of the seconds by which their activities differ.
    """
    sides = (left.seconds, right.seconds)
    change_s = abs(left.seconds.value_s - right.seconds.value_s)
    least_s = min(side.value_s for side in sides)
    if all(side.low_s is None for side in sides):
        return change_s <= SAME_FRAC * least_s
    if not _overlap(*sides) or change_s <= RESOLUTION_FRAC * least_s:
        return _overlap(*sides)
    if left.basis != right.basis or not left.activities or not right.activities:
        return True
    error_frac = max(
        max(side.upper_s / side.value_s - 1, 1 - side.lower_s / side.value_s) for side in sides
    )
    changes = _changes(left.activities, right.activities)
    return change_s <= error_frac * sum(abs(change.change_s) for change in changes)


def time_agreements(run: RunRecord, left: Source, right: Source) -> tuple[TimeAgreement, ...]:
    """One for each phase whose step has a time by both sources."""
    requests = [request_times(run).get(source) for source in (left, right)]
    modeled = [{time.phase: time for time in run.times_of(source)} for source in (left, right)]
    agreements: list[TimeAgreement] = []
    for phase, name in ((Phase.PREFILL, "ttft"), (Phase.DECODE, "decode_step")):
        first, second = (getattr(request, name, None) for request in requests)
        if first is not None and second is not None:
            shares = (_shares(times.get(phase)) for times in modeled)
            both = [_changes(*pair) for pair in zip(*shares, strict=True)]
            changes = dict(zip(("parts", "activities"), both, strict=True))
            agreements.append(TimeAgreement(phase=phase, left=first, right=second, **changes))
    return tuple(agreements)


def _shares(time: StepTime | None) -> tuple[Mapping[str, float], Mapping[str, float]]:
    activities: defaultdict[str, float] = defaultdict(float)
    for spent in () if time is None else time.activities:
        over = f" over {spent.axis}" if spent.axis else ""
        activities[spent.activity.value + over] += spent.seconds
    parts = () if time is None else time.parts
    return {p.part or BETWEEN_PARTS: p.compute_s + p.exposed_s for p in parts}, activities


def _changes(left: Mapping[str, float], right: Mapping[str, float]) -> tuple[ShareChange, ...]:
    if not left or not right:
        return ()
    changes = (
        ShareChange(share=share, left_s=left.get(share, 0.0), right_s=right.get(share, 0.0))
        for share in dict.fromkeys((*left, *right))
    )
    return tuple(sorted(changes, key=lambda change: -abs(change.change_s)))
