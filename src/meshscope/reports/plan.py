"""The result of a search as text and as JSON: the answer first, then the front, then what was left out."""

from collections.abc import Iterator
from math import ceil, floor, log10
from typing import Any

from meshscope.analysis.request import ASSUMPTION
from meshscope.analysis.roofline import main_costs
from meshscope.events.enums import REQUEST_PHASES
from meshscope.hardware.chips import ChipKind
from meshscope.plans.weights import tables_notes
from meshscope.reports.answer import Fit
from meshscope.reports.model import joined, wrapped
from meshscope.reports.tables import first_block
from meshscope.reports.times import time_figure
from meshscope.reports.words import short_dtype
from meshscope.serialize import picked
from meshscope.serving.grid import TOO_LARGE
from meshscope.serving.objective import Goal
from meshscope.serving.search import Choice, PlanSearch
from meshscope.serving.suggestions import CONVERTS
from meshscope.units import counted, format_dtype, format_seconds

NO_PLAN_LEFT = (
    "no plan is left: all are refused, for the reasons below. Change the option that they name."
)
NO_PLAN_FITS = (
    "no plan fits: weights and the smallest batch exceed the memory of a device in every plan that is "
    "not refused. Use a larger slice, --weight-dtype int8, or a shorter --prompt."
)
DEFAULT_ROWS = 8
N_FIGURES = 3  # facts before the notes on the model: the choice, its times and its memory
Fact = tuple[str, str]  # a label, empty for a sentence of its own, and what it says
_MEMORY = (*("weights_bytes", "kv_cache_bytes", "temp_bytes", "total_bytes", "hbm_bytes"), "fits")
NEAR = 1e-9  # of a rounding step: a value that has three digits stays as it is
_GOALS = {Goal.THROUGHPUT: "request tokens/s per chip", Goal.LATENCY: "end-to-end latency"}


def plan_lines(result: PlanSearch, *, n_rows: int = DEFAULT_ROWS) -> Iterator[str]:
    """The lines of the text, within 80 columns; facts that the first block does not hold follow the front."""
    facts = [_fact_text(fact) for fact in answer_facts(result)]
    facts[N_FIGURES:N_FIGURES] = _model_notes(result)
    space = result.space
    request = f"prompt {space.workload.prompt}, output {space.workload.output}"
    if space.n_first_layers is not None:
        request = f"the first {counted(space.n_first_layers, 'layer')}, {request}"
    head = "\n".join(wrapped(f"{space.model.name} on {space.topology.name}, {request}"))
    shown, left = first_block([head], ["\n".join(wrapped(text)) for text in facts])
    yield from (head, *shown, "")
    if result.front or result.nearest:
        yield from _front(result, n_rows)
        yield ""
    yield from left
    for text in (
        *result.why.values(),
        *map(_fact_text, other_facts(result)),
        *count_texts(result),
        *search_notes(result),
    ):
        yield from wrapped(text)


def _model_notes(result: PlanSearch) -> list[str]:
    """Sentences on what is not counted of the model, and on where the winner has its tables of n-grams."""
    model, winner = result.space.model, result.winner
    where = () if winner is None else tables_notes(model, winner.experiment.plan)
    return [*model.notes, *where]


def _fact_text(fact: Fact) -> str:
    return ": ".join(filter(None, fact))


def answer_facts(result: PlanSearch) -> Iterator[Fact]:
    """The best choice with its figures and reasons; without one, what comes closest and what it would take."""
    winner = result.winner
    if winner is None:
        yield from _closest_facts(result)
        return
    within = f" within {limits_text(result)}" if result.objective.has_limits else ""
    yield f"best for {_GOALS[result.objective.goal]}{within}", choice_name(winner)
    steps = {time.phase: time.step for time in result.times}
    ttft, tpot = (time_figure(steps.get(phase)) for phase in REQUEST_PHASES)
    rates = f"{winner.tokens_per_s_per_chip:,.0f} request tokens/s per chip"
    yield "", f"TTFT {ttft.text_with_range}, TPOT {tpot.text_with_range}, {rates}"
    yield "fits", f"{winner.memory.fit.label}, {Fit(memory=winner.memory).amount}"
    if result.equals:
        is_throughput = result.objective.goal is Goal.THROUGHPUT
        rates = (f"{c.tokens_per_s_per_chip:,.0f} request tokens/s per chip" for c in result.equals)
        values = rates if is_throughput else (format_seconds(c.e2e_s) for c in result.equals)
        pairs = zip(result.equals, values, strict=True)
        equals = joined([f"'{choice.experiment.plan}' ({value})" for choice, value in pairs])
        yield "equal within errors that they do not share", equals
    yield from (("why", sentence) for sentence in main_costs(result.why.values()))
    if result.won_by is not None:
        is_equal = result.won_by.runner_up in result.equals
        yield "what differs" if is_equal else "why it wins", result.won_by.sentence


def limits_text(result: PlanSearch) -> str:
    """`TTFT 500 ms, TPOT 30 ms`."""
    objective = result.objective
    limits = {"TTFT": objective.ttft_s, "TPOT": objective.tpot_s}
    return ", ".join(f"{k} {format_seconds(v)}" for k, v in limits.items() if v is not None)


def _closest_facts(result: PlanSearch) -> Iterator[Fact]:
    space, closest = result.space, result.closest
    if closest is None:
        yield "", NO_PLAN_FITS if TOO_LARGE in result.n_refused else NO_PLAN_LEFT
        return
    exceeded, met = list[str](), list[str]()
    for name in ("ttft", "tpot"):
        limit_s: float | None = getattr(result.objective, f"{name}_s")
        if limit_s is not None:
            seconds = max(getattr(closest, f"{name}_s"), limit_s)
            if seconds > limit_s:
                exceeded.append(f"{seconds / limit_s:.1f} times the limit of {name.upper()}")
            step = 10.0 ** (floor(log10(seconds)) - 2)  # three digits, not below the value
            met.append(f"{name}={ceil(seconds / step - NEAR) * step:.6g}")
    ttft, tpot = result.fastest
    least = (
        f"TTFT {format_seconds(ttft.ttft_s)} ({choice_name(ttft)})",
        f"TPOT {format_seconds(tpot.tpot_s)} ({choice_name(tpot)})",
    )
    wider = space.topology.chip.name if space.topology.chip.kind is ChipKind.TPU else "any"
    smaller = "; a smaller --batch shortens both" if space.batches.least > 1 else ""
    yield "", f"no plan meets {limits_text(result)}"
    yield "closest", _latencies(closest)
    yield "", f"it takes {joined(exceeded)}"
    yield "", f"it meets --slo {','.join(met)}; the least of any choice: {joined(least)}"
    yield "", f"--topology {wider} searches other slices{smaller}."


def _latencies(choice: Choice) -> str:
    times = f"TTFT {format_seconds(choice.ttft_s)}, TPOT {format_seconds(choice.tpot_s)}"
    return f"{choice_name(choice)}: {times}"


def _figures_text(choice: Choice) -> str:
    return f"{_latencies(choice)}, {choice.tokens_per_s_per_chip:,.0f} request tokens/s per chip"


def choice_name(choice: Choice, *, has_chunk: bool = True) -> str:
    """`dp=2,tp=4, batch 16, weights int8, cache int8, chunk 8192`."""
    workload = choice.experiment.workload
    text = f"{choice.experiment.plan}, batch {workload.batch}"
    text += f", weights {format_dtype(workload.weight_dtype)}, cache {format_dtype(workload.cache_dtype)}"
    chunk = workload.prefill_chunk if has_chunk else None
    return text if chunk is None else f"{text}, chunk {chunk}"


def _front(result: PlanSearch, n_rows: int) -> Iterator[str]:
    """The choices with their figures; if none meets the limits, the nearest ones with times over limits."""
    limits_s = {name: getattr(result.objective, f"{name}_s") for name in ("ttft", "tpot")}
    limits = {} if result.front else {name: s for name, s in limits_s.items() if s is not None}
    last = "".join(f"{f'/ {name.upper()}':>7}" for name in limits) or f"{'tok/s/chip':>12}"
    yield f"{'plan':<25}{'batch':>7} {'weights,cache':<14} {'TTFT':>8} {'TPOT':>8}{last}"
    rows = [*result.front, *result.nearest][:n_rows]
    for choice in rows:
        workload = choice.experiment.workload
        dtypes = f"{short_dtype(workload.weight_dtype)},{short_dtype(workload.cache_dtype)}"
        ratios = (getattr(choice, f"{name}_s") / limit_s for name, limit_s in limits.items())
        last = "".join(f"{f'{ratio:.3g}x':>7}" for ratio in ratios)
        last = last or f"{choice.tokens_per_s_per_chip:>12,.0f}"
        yield (
            f"{choice.experiment.plan!s:<25}{workload.batch:>7} {dtypes:<14} "
            f"{format_seconds(choice.ttft_s):>8} {format_seconds(choice.tpot_s):>8}"
            f"{last}"
        )
    if limits:
        names = joined([f"/ {name.upper()}" for name in limits])
        yield f"no choice meets the limits; {names}: the time over its limit"
        return
    n_left = len(result.front) - n_rows
    if n_left > 0:
        yield f"and {n_left} more on the Pareto front (--top)"


def other_facts(result: PlanSearch) -> Iterator[Fact]:
    """Another format of weights than the checkpoint's, and the best without it."""
    wide, stored = result.unquantized, result.own_format
    winner = result.winner or result.closest
    if winner is not None:
        dtype = winner.experiment.workload.weight_dtype
        of_checkpoint = result.space.model.default_weight_dtype
        if dtype != of_checkpoint:
            said = f"{CONVERTS}, which has {format_dtype(of_checkpoint)}"
            yield f"weights {format_dtype(dtype)}", said
        if stored is not None and stored != wide:
            yield "own format", _figures_text(stored)
    if wide is not None and winner is not None and wide.experiment != winner.experiment:
        yield "without quantization", _figures_text(wide)


def search_notes(result: PlanSearch) -> Iterator[str]:
    """What the figures assume."""
    if result.is_extrapolated:
        yield "times are extrapolated beyond measured collectives"
    if reasons := [time.no_interval for time in result.times if time.no_interval]:
        yield f"times have no interval: {reasons[0]}"
    yield (
        "tok/s/chip: request tokens/s per chip, the output tokens of a batch over its prefill and all decode steps. TTFT: prefill of "
        f"the whole batch. Assumes {ASSUMPTION}."
    )


def count_texts(result: PlanSearch) -> Iterator[str]:
    """How many plans and combinations were searched, refused and left out."""
    counts = f"{result.n_counted:,} plans counted, {result.n_plans:,} divide model and prompt"
    yield (
        f"{counts}; {result.n_combinations:,} combinations with batch, precision and chunk counted, "
        f"{result.n_candidates:,} predicted, {result.n_meeting:,} of them within the limits"
    )
    for reason, n in result.n_refused.items():
        yield f"refused: {counted(n, 'plan')}, as {reason}"
    for reason, n in result.n_pruned.items():
        if n:
            yield f"left out: {counted(n, 'combination')}, as {reason}"


def plan_document(result: PlanSearch) -> dict[str, Any]:
    """The result as one JSON document."""
    space, won_by = result.space, result.won_by
    choices: dict[str, Any] = {
        name: one and choice_document(one)
        for name, one in picked(result, "winner", "own_format", "closest", "unquantized").items()
    }
    for name in ("equals", "front", "best", "nearest", "fastest"):
        choices[name] = [choice_document(choice) for choice in getattr(result, name)]
    return {
        "model": space.model.name,
        "notes": _model_notes(result),
        "topology": space.topology.name,
        "n_chips": space.topology.n_chips,
        "prompt": space.workload.prompt,
        "output": space.workload.output,
        "objective": {
            "goal": result.objective.goal.value,
            **picked(result.objective, "ttft_s", "tpot_s"),
        },
        **choices,
        "intervals": {
            time.phase.value: {"s": time.step.value_s, **picked(time.step, "low_s", "high_s")}
            for time in result.times
        },
        "no_interval": next(filter(None, (time.no_interval for time in result.times)), None),
        "is_extrapolated": result.is_extrapolated,
        "why": {phase.value: sentence for phase, sentence in result.why.items()},
        "won_by": won_by
        and {
            "runner_up": choice_document(won_by.runner_up),
            "seconds": dict(won_by.seconds),
            "wire_bytes": dict(won_by.wire_bytes),
            "sentence": won_by.sentence,
        },
        "space": {
            **picked(result, "n_counted", "n_plans", "n_combinations", "n_candidates", "n_meeting"),
            "n_refused": dict(result.n_refused),
            "n_pruned": {reason: n for reason, n in result.n_pruned.items() if n},
        },
    }


def choice_document(choice: Choice) -> dict[str, Any]:
    """A choice with its figures as plain values."""
    workload, memory = choice.experiment.workload, choice.memory
    figures = ("ttft_s", "tpot_s", "e2e_s", "tokens_per_s_per_chip", "decode_tokens_per_s_per_chip")
    return {
        "plan": str(choice.experiment.plan),
        **picked(workload, "batch", "weight_dtype", "cache_dtype", "prefill_chunk"),
        **picked(choice, *figures),
        "memory": picked(memory, *_MEMORY),
    }
