"""The result of a search as text and as JSON: the answer first, then the front, then what was left out."""

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10
from typing import Any

from meshscope.analysis.request import ASSUMPTION, TimeAgreement
from meshscope.analysis.roofline import main_costs
from meshscope.events.enums import REQUEST_PHASES
from meshscope.hardware.chips import ChipKind
from meshscope.plans.placement import order_text
from meshscope.plans.weights import tables_notes
from meshscope.reports.answer import Fit
from meshscope.reports.model import joined, wrapped
from meshscope.reports.tables import first_block
from meshscope.reports.times import time_figure
from meshscope.reports.words import short_dtype, signed_seconds
from meshscope.serialize import picked, to_plain
from meshscope.serving.grid import TOO_LARGE
from meshscope.serving.launch import Launch, launches_of
from meshscope.serving.objective import Goal
from meshscope.serving.search import (
    MIN_GAIN,
    Choice,
    PlacementSearch,
    PlanSearch,
    TimedPlan,
    VerifiedChoice,
)
from meshscope.serving.suggestions import CONVERTS
from meshscope.units import counted, format_bytes, format_dtype, format_rate, format_seconds

NO_PLAN_LEFT = (
    "no plan is left: all are refused, for the reasons below. Change the option that they name."
)
NO_PLAN_FITS = (
    "no plan fits: weights and the smallest batch exceed the memory of a device in every plan that is "
    "not refused. Use a larger slice, --weight-dtype int8, or a shorter --prompt."
)
DEFAULT_ROWS = 8
N_FIGURES = 3  # facts before the notes on the model: the choice, its times and its memory
MIN_MISS_FRAC = 0.01  # of a step; smaller differences of a cause are not named
MAX_CAUSES = 4
Fact = tuple[str, str]  # a label, empty for a sentence of its own, and what it says
_MEMORY = (*("weights_bytes", "kv_cache_bytes", "temp_bytes", "total_bytes", "hbm_bytes"), "fits")
NEAR = 1e-9  # of a rounding step: a value that has three digits stays as it is
_GOALS = {Goal.THROUGHPUT: "request tokens/s per chip", Goal.LATENCY: "end-to-end latency"}


def plan_lines(
    result: PlanSearch, *, n_rows: int = DEFAULT_ROWS, has_launch: bool = False
) -> Iterator[str]:
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
    for launch in _launches(result) if has_launch else ():
        yield from ("", f"{launch.server}:", f"  {launch.command}")
        for source in dict.fromkeys(flag.source for flag in launch.flags):
            names = [flag.words[0] for flag in launch.flags if flag.source == source]
            yield from wrapped(f"{', '.join(names)}: {source}", indent=2)
        for item in launch.not_expressed:
            yield from wrapped(f"not expressed: {item}", indent=2)


def _model_notes(result: PlanSearch) -> list[str]:
    """Sentences on what is not counted of the model, and on where the winner has its tables of n-grams."""
    model, winner = result.space.model, result.winner
    where = () if winner is None else tables_notes(model, winner.experiment.plan)
    return [*model.notes, *where]


def _launches(result: PlanSearch) -> tuple[Launch, ...]:
    winner = result.winner
    return () if winner is None else launches_of(winner.experiment, result.space.n_first_layers)


def _fact_text(fact: Fact) -> str:
    return ": ".join(filter(None, fact))


def answer_facts(result: PlanSearch) -> Iterator[Fact]:
    """The best choice with its figures and reasons; without one, what comes closest and what it would take."""
    winner = result.winner
    if winner is None:
        yield from _closest_facts(result)
        return
    yield f"best for {goal_text(result)}", choice_name(winner)
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
    if result.placements is not None:
        yield "placement", _placement_text(result.placements)


def _placement_text(placements: PlacementSearch) -> str:
    n, in_order, best = len(placements.placed), placements.in_order, placements.best
    more = f" ({placements.n_left:,} more were not tried)" if placements.n_left else ""
    if best is None:
        slowest = placements.placed[-1].e2e_s / in_order.e2e_s
        return (
            f"device ids in mesh order: none of {n} placements on the torus{more} saves {MIN_GAIN:.0%} of "
            f"a request; the slowest takes {slowest:.2f} x"
        )
    gain_s = in_order.e2e_s - best.e2e_s
    return (
        f"{best.placement}, the fastest of {n} on the torus{more}: a request saves "
        f"{format_seconds(gain_s)} ({gain_s / in_order.e2e_s:.1%}) against device ids in mesh order"
    )


def goal_text(result: PlanSearch) -> str:
    """What is optimized, and within which limits."""
    text = _GOALS[result.objective.goal]
    return f"{text} within {limits_text(result)}" if result.objective.has_limits else text


def limits_text(result: PlanSearch) -> str:
    """`TTFT 500 ms, TPOT 30 ms`, after the name of a preset."""
    objective = result.objective
    limits = {"TTFT": objective.ttft_s, "TPOT": objective.tpot_s}
    text = ", ".join(f"{k} {format_seconds(v)}" for k, v in limits.items() if v is not None)
    return f"{objective.name} ({text})" if objective.name else text


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
    rows = [*result.front, *result.dominated, *result.nearest][:n_rows]
    for at, choice in enumerate(rows):
        workload = choice.experiment.workload
        dtypes = f"{short_dtype(workload.weight_dtype)},{short_dtype(workload.cache_dtype)}"
        ratios = (getattr(choice, f"{name}_s") / limit_s for name, limit_s in limits.items())
        last = "".join(f"{f'{ratio:.3g}x':>7}" for ratio in ratios)
        last = last or f"{choice.tokens_per_s_per_chip:>12,.0f}"
        if result.front and at >= len(result.front):
            last += " *"
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
    if len(rows) > len(result.front):
        yield "* dominated: another choice has better TTFT, TPOT and request tokens/s per chip"


def other_facts(result: PlanSearch) -> Iterator[Fact]:
    """Another format of weights than the checkpoint's, the best without it, and prefill and decode apart."""
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
    if (apart := result.apart) is None:
        return
    prefill, decode = apart.prefill, apart.decode
    times = (prefill.ttft_s, decode.tpot_s, apart.transfer_s)
    ttft, tpot, transfer = map(format_seconds, times)
    rate = f"{format_rate(apart.prompts_per_s_per_chip)} prompts/s per chip"
    yield "prefill apart", f"{choice_name(prefill)}: TTFT {ttft}, {rate}"
    rate = f"{decode.decode_tokens_per_s_per_chip:,.0f} decode tokens/s per chip"
    moved = f"{format_bytes(apart.kv_bytes)} of cache per prompt move over DCN in {transfer}"
    name = choice_name(decode, has_chunk=False)
    yield "decode apart", f"{name}: TPOT {tpot}, {rate}; before it, {moved}"


def verified_lines(verified: Sequence[VerifiedChoice]) -> Iterator[str]:
    """The compiled choices in the order of their compiled times, and what the prediction missed."""
    yield f"compiled, best first{'':<12} {'TTFT':>8} {'TPOT':>8} {'tok/s/chip':>11} fits"
    for one in verified:
        name = f"{one.choice.experiment.plan}, batch {one.choice.experiment.workload.batch}"
        if (compiled := one.compiled) is None:
            yield from wrapped(f"{name}: {one.failure}")
            continue
        fits = {True: "yes", False: "NO", None: "?"}[compiled.memory.fits]
        yield (
            f"{name:<33}{format_seconds(compiled.ttft_s):>8} {format_seconds(compiled.tpot_s):>8} "
            f"{compiled.tokens_per_s_per_chip:>11,.0f} {fits}"
        )
        yield from wrapped(f"{one.missed}; {one.folder}", indent=2)
        for miss in one.misses:
            yield from wrapped(miss_sentence(miss), indent=4)
        for sentence in one.why.values():
            yield from wrapped(sentence, indent=2)


def miss_sentence(miss: TimeAgreement) -> str:
    """`decode: compiled 15.1 ms, predicted 12.9 ms: +1.4 ms matmuls, +0.6 ms exposed tp communication`."""
    seconds = f"compiled {format_seconds(miss.right.value_s)}, predicted {format_seconds(miss.left.value_s)}"
    causes = [c for c in miss.changes if abs(c.change_s) >= MIN_MISS_FRAC * miss.left.value_s]
    largest = sorted(causes, key=lambda change: -abs(change.change_s))[:MAX_CAUSES]
    named = ", ".join(f"{signed_seconds(c.change_s)} {c.share}" for c in largest)
    within = "" if miss.is_within else "; the intervals do not overlap"
    return f"{miss.phase}: {seconds}{': ' if named else ''}{named}{within}"


def search_notes(result: PlanSearch) -> Iterator[str]:
    """What the figures assume."""
    if result.is_extrapolated:
        yield "times are extrapolated beyond measured collectives"
    if reasons := [time.no_interval for time in result.times if time.no_interval]:
        yield f"times have no interval: {reasons[0]}"
    if result.objective.source is not None:
        yield f"limits: {result.objective.source}"
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
    space, won_by, apart, placed = result.space, result.won_by, result.apart, result.placements
    choices: dict[str, Any] = {
        name: one and choice_document(one)
        for name, one in picked(result, "winner", "own_format", "closest", "unquantized").items()
    }
    for name in ("equals", "front", "dominated", "best", "nearest", "fastest"):
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
            **picked(result.objective, "ttft_s", "tpot_s", "name", "source"),
        },
        **choices,
        "intervals": {
            time.phase.value: {"s": time.step.value_s, **picked(time.step, "low_s", "high_s")}
            for time in result.times
        },
        "no_interval": next(filter(None, (time.no_interval for time in result.times)), None),
        "is_extrapolated": result.is_extrapolated,
        "why": {phase.value: sentence for phase, sentence in result.why.items()},
        "placement": placed
        and {
            "n_tried": len(placed.placed),
            "n_left": placed.n_left,
            "mesh_order_e2e_s": placed.in_order.e2e_s,
            "best": placed.best
            and {**_placed_document(placed.best), "devices": list(placed.best.devices)},
            "placements": [_placed_document(one) for one in placed.placed],
        },
        "won_by": won_by
        and {
            "runner_up": choice_document(won_by.runner_up),
            "seconds": dict(won_by.seconds),
            "wire_bytes": dict(won_by.wire_bytes),
            "sentence": won_by.sentence,
        },
        "apart": apart
        and {
            "prefill": choice_document(apart.prefill),
            "decode": choice_document(apart.decode),
            **picked(apart, "prompts_per_s_per_chip", "kv_bytes", "transfer_s"),
        },
        "space": {
            **picked(result, "n_counted", "n_plans", "n_combinations", "n_candidates", "n_meeting"),
            "n_refused": dict(result.n_refused),
            "n_pruned": {reason: n for reason, n in result.n_pruned.items() if n},
        },
        "launch": to_plain(_launches(result)),
    }


def choice_document(choice: Choice) -> dict[str, Any]:
    """A choice with its figures as plain values."""
    workload, memory = choice.experiment.workload, choice.memory
    figures = ("ttft_s", "tpot_s", "e2e_s", "tokens_per_s_per_chip", "decode_tokens_per_s_per_chip")
    return {
        "plan": str(choice.experiment.plan),
        "device_order": order_text(choice.experiment.mesh, choice.experiment.topology),
        **picked(workload, "batch", "weight_dtype", "cache_dtype", "prefill_chunk"),
        **picked(choice, *figures),
        "memory": picked(memory, *_MEMORY),
    }


def verified_document(verified: VerifiedChoice) -> dict[str, Any]:
    """A compiled choice as plain values."""
    figures, one = ("ttft_s", "tpot_s", "e2e_s", "tokens_per_s_per_chip"), verified.compiled
    return {
        "predicted": choice_document(verified.choice),
        "run": verified.folder,
        **(dict.fromkeys(figures) if one is None else picked(one, *figures)),
        "fits": one and one.memory.fits,
        **picked(verified, "missed", "failure"),
        "why": {phase.value: sentence for phase, sentence in verified.why.items()},
        "misses": [
            {
                "phase": miss.phase.value,
                "predicted_s": miss.left.value_s,
                "compiled_s": miss.right.value_s,
                "is_within_intervals": miss.is_within,
                **{
                    name: {c.share: {"predicted_s": c.left_s, "compiled_s": c.right_s} for c in of}
                    for name, of in (("causes", miss.activities), ("parts", miss.parts))
                },
            }
            for miss in verified.misses
        ],
    }


def _placed_document(placed: TimedPlan) -> dict[str, Any]:
    return {"axes": str(placed.placement), **picked(placed, "ttft_s", "tpot_s", "e2e_s")}
