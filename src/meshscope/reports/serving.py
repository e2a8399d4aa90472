"""A simulated server as text and as JSON: the answer first, then conditions and details."""

from collections.abc import Iterable, Iterator, Mapping
from math import isfinite, log
from typing import Any

from meshscope.plans.experiment import Experiment
from meshscope.plans.weights import tables_notes
from meshscope.reports.model import wrapped
from meshscope.serialize import picked, to_plain
from meshscope.serving.simulation import (
    EngineRole,
    Percentiles,
    PlacedPool,
    ServingOutcome,
    SimulatedLoad,
)
from meshscope.serving.step_costs import LoadedPrograms
from meshscope.units import (
    counted,
    format_bytes,
    format_dtype,
    format_gib,
    format_rate,
    format_seconds,
)

Fact = tuple[str, str]  # a label and a sentence, empty if there is none

WHOLE = "request"
_LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": WHOLE}
TIME_COLUMNS = ("mean", "p50", "p90", "p99")
MAX_RATIO = 8  # instances of a kind in a suggested ratio
LABEL_WIDTH = 10


def serving_lines(outcome: ServingOutcome, *, is_full: bool = False) -> Iterator[str]:
    """The answer in up to twelve lines of 80 columns; `is_full` adds conditions and details."""
    name, main = outcome.main.experiment.model.name, outcome.main
    title = f"{name} on {f'{main.n_instances} x ' if main.n_instances > 1 else ''}{_instance(main)}"
    if outcome.prefill is not None:
        title = f"{name}: " + ", ".join(
            f"{placed.n_instances} x {_instance(placed)} {role}"
            for placed, role in ((outcome.prefill, "prefill"), (main, "decode"))
        )
    yield from wrapped(title)
    yield from _labeled(_rate_facts(outcome))
    yield f"{'':<{LABEL_WIDTH}}" + "".join(f"{column:>10}" for column in TIME_COLUMNS)
    for time, label in _LABELS.items():
        values: Percentiles | None = getattr(outcome.result.figures, time)
        if values is not None and (is_full or label != WHOLE):
            cells = (format_seconds(getattr(values, f"{column}_s")) for column in TIME_COLUMNS)
            yield f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>10}" for cell in cells)
    yield from _labeled(_engine_facts(outcome))
    if is_full:
        yield ""
        yield from _labeled(_condition_facts(outcome))


def _rate_facts(outcome: ServingOutcome) -> Iterator[Fact]:
    figures, objective = outcome.result.figures, outcome.objective
    limits = {"TTFT": objective.ttft_s, "TPOT": objective.tpot_s}
    named = [f"{name} {format_seconds(s)}" for name, s in limits.items() if s is not None]
    good = f"{format_rate(figures.goodput_per_s)} requests/s, {figures.goodput_frac:.1%} of all"
    tokens = figures.output_tokens_per_s
    yield "rate", rate_verdict(outcome.result)
    yield "goodput", f"{good}, within {' and '.join(named)}" if named else ""
    rates = (figures.requests_per_s, tokens, tokens / outcome.n_chips)
    yield (
        "served",
        "{} requests/s, {} request tokens/s, {} per chip".format(*map(format_rate, rates)),
    )


def _engine_facts(outcome: ServingOutcome) -> Iterator[Fact]:
    for pool in outcome.result.pools:
        engines = f"{pool.n_engines} engines, each " if pool.n_engines > 1 else ""
        running = f"{format_rate(pool.mean_running)} sequences"
        cache = f"cache {pool.mean_cache_frac:.0%} used"
        if outcome.result.prefix_hit_frac is not None:
            cache += f", {outcome.result.prefix_hit_frac:.0%} of prompts from it"
        yield pool.role, f"{engines}busy {pool.busy_frac:.0%}, {running}, {cache}"
    yield "bound by", _bound_verdict(outcome)
    if outcome.main.programs is not None:
        yield from _program_facts(outcome)
    elif outcome.server is None:
        yield "basis", "an ideal engine and predicted steps; docs/serving.md has their errors"
    else:
        yield "basis", outcome.server.basis
    yield "note", "; ".join(_notes(outcome.main.experiment))


def _program_facts(outcome: ServingOutcome) -> Iterator[Fact]:
    """Whether the compiled programs of a device fit, in the pool with the least room, and how long they take."""
    pools = [one for one in (outcome.main, outcome.prefill) if one is not None]
    loaded = [one.programs for one in pools if one.programs is not None]
    if not loaded:
        return
    least = min(loaded, key=lambda one: (one.room_bytes is not None, one.room_bytes or 0.0))
    yield "fits", _programs_fit(least)
    ratios = [one for each in loaded for of in each.ratios.values() for one in of.values()]
    ratio = f"{min(ratios):.2f} to {max(ratios):.2f} x predicted"
    n_programs = sum(one.n_programs for one in loaded)
    of_whom = f"{n_programs} programs of {loaded[0].name}"
    yield "basis", f"{outcome.server or 'an ideal engine'}; {of_whom}, {ratio}"


def program_lines(outcome: ServingOutcome) -> Iterator[str]:
    """The lines of an answer on compiled programs; none for predicted steps."""
    yield from _labeled(_program_facts(outcome))


def _programs_fit(programs: LoadedPrograms) -> str:
    if programs.resident_bytes is None or programs.hbm_bytes is None:
        return "unknown"
    parts = (programs.resident_bytes, programs.code_bytes, programs.temp_bytes)
    held, code, temps = (f"{one / 2**30:.2f}" for one in parts)
    verdict = "yes" if programs.fits else "NO"
    limit = format_gib(programs.hbm_bytes)
    return f"{verdict}: weights and cache {held}, code {code}, temporaries {temps} of {limit}"


def _notes(experiment: Experiment) -> tuple[str, ...]:
    return (*experiment.model.notes, *tables_notes(experiment.model, experiment.plan))


def _labeled(facts: Iterable[Fact]) -> Iterator[str]:
    """Sentences after their labels, each on as many lines as it needs; none for an empty one."""
    for label, text in facts:
        if text:
            first, *rest = wrapped(f"{label:<{LABEL_WIDTH}}".replace(" ", "\0") + text)
            yield first.replace("\0", " ")
            yield from (" " * (LABEL_WIDTH - 2) + line for line in rest)


def _instance(placed: PlacedPool) -> str:
    return f"{placed.experiment.topology.name} {placed.experiment.plan}"


def rate_verdict(result: SimulatedLoad) -> str:
    """Whether the queue stays bounded, and up to which rate."""
    limit = f"{format_rate(result.saturated_per_s)}"
    if result.offered_per_s is None and result.max_concurrency is not None:
        return f"{result.max_concurrency:,} requests in flight; with more, up to {limit} requests/s can be served"
    if result.offered_per_s is None:
        return f"all requests arrive at once; up to {limit} requests/s can be served"
    offered = f"{format_rate(result.offered_per_s)} requests/s"
    if result.is_stable:
        return f"stable: {offered} arrive, up to {limit} can be served"
    return f"NOT STABLE: {offered} arrive, at most {limit} are served; the queue grows"


def _bound_verdict(outcome: ServingOutcome) -> str:
    pool, fit = outcome.result.slowest, outcome.host_fit
    if fit is not None:
        bound = "the host" if fit.host_s > fit.device_itl_s else "the device"
        measured, device = map(format_seconds, (fit.measured_itl_s, fit.device_itl_s))
        return f"{bound}: median ITL {measured} measured, {device} without host time"
    if pool.step_s is None:
        return ""
    step = f"a mean step takes {format_seconds(pool.step_s)}"
    if not pool.host_frac:
        host = "no host time is assumed" if outcome.server is None else "the fit has no host time"
        return f"the device: {step}, and {host}"
    bound = "the host" if pool.host_frac > 0.5 else "the device"
    return f"{bound}: {step}, {pool.host_frac:.0%} of it host time"


def _condition_facts(outcome: ServingOutcome) -> Iterator[Fact]:
    main, policy = outcome.main, outcome.main.pool.policy
    workload = main.experiment.workload
    weights, cache = map(format_dtype, (workload.weight_dtype, workload.cache_dtype))
    n_layers = main.experiment.model.n_layers
    yield "model", f"{n_layers} layers; weights {weights}, cache {cache}"
    yield "load", outcome.load
    if outcome.server is not None:
        yield "server", f"fitted to runs of {outcome.server.dated}; docs/serving.md has its errors"
    of_step = f"{policy.max_sequences} sequences and {policy.max_step_tokens:,} tokens per step"
    yield "limits", f"{of_step}, {main.n_cache_tokens:,} tokens of cache per engine"
    host = format_seconds(policy.host_s) if policy.host_s else "no time"
    if policy.host_sequence_s:
        host = f"{host} and {format_seconds(policy.host_sequence_s)} per sequence,"
    before = format_seconds(policy.host_request_s)
    later = f", {before} before a request is scheduled" if policy.host_request_s else ""
    steps = "prefill and decode" if policy.has_mixed_steps else "either prefill or decode"
    simulated = outcome.result.prefix_hit_frac
    hits = f"{policy.prefix_hit_frac if simulated is None else simulated:.0%}"
    yield "host", f"{host} per step{later}; prefix hits {hits}; steps {steps}"
    if main.pool.n_engines > 1 and outcome.prefill is None:
        yield "engines", f"{main.pool.n_engines}, which requests take in turn; one is simulated"
    for pool in outcome.result.pools:
        most = f"at most {pool.peak_waiting:,} waiting, cache at most {pool.peak_cache_frac:.0%}"
        preempted = counted(pool.n_preemptions, "preemption")
        yield pool.role, f"{pool.n_steps:,} steps, {most}, {preempted}"
    yield from _apart_details(outcome)
    yield "left out", left_out_text(outcome)


def _apart_details(outcome: ServingOutcome) -> Iterator[Fact]:
    moved, transfer = outcome.result.transfers, outcome.transfer
    if moved is None or transfer is None or outcome.prefill is None:
        return
    one = f"{format_bytes(round(moved.mean_bytes))} per prompt in {format_seconds(moved.mean_s)}"
    waits = f"{format_seconds(moved.wait.p50_s)} (p50) to {format_seconds(moved.wait.p99_s)} (p99)"
    yield (
        "transfer",
        f"{one} over {transfer.path.upper()}; waits {waits}; busiest network {moved.busy_frac:.0%} busy",
    )
    if not isfinite(outcome.result.slowest.saturated_per_s):
        return
    rates = {pool.role: pool.saturated_per_s for pool in outcome.result.pools}
    prefill, decode = rates[EngineRole.PREFILL], rates[EngineRole.DECODE]
    n_prefill, n_decode = even_ratio(
        prefill / outcome.prefill.n_instances, decode / outcome.main.n_instances
    )
    alone = f"prefill alone serves {format_rate(prefill)} requests/s, decode {format_rate(decode)}"
    yield "balance", f"{alone}; --apart {n_prefill}:{n_decode} comes close to even"


def even_ratio(prefill_per_s: float, decode_per_s: float) -> tuple[int, int]:
    """Numbers of instances that serve about the same rate, from the rate of one of each."""
    counts = range(1, MAX_RATIO + 1)
    pairs = ((n_prefill, n_decode) for n_prefill in counts for n_decode in counts)
    return min(pairs, key=lambda n: (abs(log(n[0] * prefill_per_s / (n[1] * decode_per_s))), n))


def left_out_text(outcome: ServingOutcome) -> str:
    """The requests that were not simulated, and why; empty if all were."""
    left = outcome.left_out
    reasons = {
        "without tokens": left.n_empty,
        "beyond the context of the model": left.n_beyond_context,
        "longer than the cache": left.n_beyond_cache,
    }
    return "; ".join(f"{counted(n, 'request')} {why}" for why, n in reasons.items() if n)


def serving_document(outcome: ServingOutcome, request: Mapping[str, Any]) -> dict[str, Any]:
    """The document of --json: the answer first, then the conditions."""
    result, main = outcome.result, outcome.main
    slowest = result.slowest
    return {
        "is_stable": result.is_stable,
        "bound_by": "host" if slowest.host_frac > 0.5 else "device",
        **to_plain(result),
        "request": dict(request),
        "n_chips": outcome.n_chips,
        "notes": [*_notes(main.experiment)],
        "interval_factor": outcome.server and outcome.server.interval_factor,
        "objective": picked(outcome.objective, "ttft_s", "tpot_s"),
        "policy": to_plain(main.pool.policy),
        "n_cache_tokens": main.n_cache_tokens,
        "left_out": to_plain(outcome.left_out),
        "programs": None if main.programs is None else to_plain(main.programs),
        "prefill_programs": outcome.prefill and to_plain(outcome.prefill.programs),
        "host_fit": None if outcome.host_fit is None else to_plain(outcome.host_fit),
    }
