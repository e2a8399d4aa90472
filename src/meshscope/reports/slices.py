"""Which slice, as text and as documents: where a model fits, and the cheapest for an objective."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from meshscope.model.model import Model
from meshscope.plans.memory import FitState
from meshscope.reports.model import joined, wrapped
from meshscope.reports.plan import choice_document
from meshscope.reports.tables import new_table, with_first_block
from meshscope.reports.words import short_dtype
from meshscope.serialize import picked, to_plain
from meshscope.serving.prices import price_per_hour
from meshscope.serving.slices import SliceFit, SliceSearch, slice_name
from meshscope.units import counted, format_gib, format_seconds

_STYLES = {FitState.YES: "green", FitState.NO: "bold red"}


def slice_fits_table(
    fits: Sequence[SliceFit], batch: str | None, prices: Mapping[str, float] | None = None
) -> Table:
    """One row for each slice and precision; an hour's price if prices are known."""
    fits_name = "fits" if batch is None else f"batch {batch}\nfits"
    dtypes = ("weights,cache",) if len({_dtypes(fit) for fit in fits}) > 1 else ()
    price_column = () if prices is None else ("an hour",)
    names = ("slice", fits_name, "plan", *dtypes)
    figures = (*price_column, "GiB per device", "largest\nbatch", "context")
    table = new_table(*names, *figures, n_words=len(names))
    for fit in fits:
        state, context, hour = fit.memory.fit, fit.context, price_per_hour(fit.topology, prices)
        memory = (fit.memory.total_bytes or fit.memory.known_bytes, fit.memory.hbm_bytes)
        device = " of ".join(format_gib(n).removesuffix(" GiB") for n in memory)  # `19.2 of 31.25`
        bound = "<=" if fit.memory.temp_bytes is None else ""  # unknown buffers count as nothing
        positions = f"{bound}{context.positions:,}{'+' if context.is_of_model else ''}"
        table.add_row(
            *(fit.name, Text(state.label, style=_STYLES.get(state, "yellow")), str(fit.plan)),
            *([_dtypes(fit)] if dtypes else []),
            *([] if prices is None else ["-" if hour is None else f"{hour:,.2f}"]),
            f"{'>=' if fit.memory.total_bytes is None else ''}{device}",
            f"{bound}{fit.largest_batch:,}" if fit.largest_batch else "-",
            positions if context.positions else "-",
        )
    return table


def fits_lines(model: Model, fits: Sequence[SliceFit], batch: str | None) -> Iterator[str]:
    """`Qwen/Qwen3-8B, batch 64: 34 of 35 slices have room; the smallest are v5e-4 (tp=4) and v6e-1 (tp=1)`."""
    able = [fit for fit in fits if fit.memory.fit is FitState.YES]
    smallest: dict[str, SliceFit] = {}
    for fit in sorted(able, key=lambda fit: fit.topology.n_chips):
        smallest.setdefault(fit.topology.chip.name, fit)
    asked = model.name if batch is None else f"{model.name}, batch {batch}"
    n_able, n_slices = (len({fit.name for fit in each}) for each in (able, fits))
    have = "has" if n_able == 1 else "have"
    counts = f"{asked}: {n_able} of {counted(n_slices, 'slice')} {have} room"
    named = joined([f"{fit.name} ({fit.plan})" for fit in smallest.values()])
    if n_able > 1:
        counts += f"; the smallest {'is' if len(smallest) == 1 else 'are'} {named}"
    yield from wrapped(counts)


def _dtypes(fit: SliceFit) -> str:
    return f"{short_dtype(fit.workload.weight_dtype)},{short_dtype(fit.workload.cache_dtype)}"


def fit_notes(
    model: Model, fits: Sequence[SliceFit], refused: Mapping[str, str], batch: str | None
) -> Iterator[str]:
    """What the table assumes, and the slices that it lacks."""
    workload = fits[0].workload
    dtypes = " or ".join(dict.fromkeys(map(_dtypes, fits)))
    at_batch = "one sequence for each data-parallel rank" if batch is None else f"batch {batch}"
    yield from wrapped(
        f"{model.name}, weights,cache {dtypes}, prompt {workload.prompt}, output {workload.output}. Fits, GiB and "
        f"context: with {at_batch}; temporary buffers are estimated; >= and <= where they are unknown and count as nothing. Context: + if "
        "the model limits it. Plans of tp, dp and ep."
    )
    for note in model.notes:
        yield from wrapped(note)
    for reason in dict.fromkeys(refused.values()):
        names = [name for name, why in refused.items() if why == reason]
        yield from wrapped(f"no answer for {joined(names)}: {reason}")


def slice_fit_document(fit: SliceFit, prices: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A slice as plain values; `memory` is for `batch`."""
    return {
        "slice": fit.name,
        "topology": fit.topology.name,
        "n_chips": fit.topology.n_chips,
        "price_per_hour": None if prices is None else price_per_hour(fit.topology, prices),
        "fits": fit.memory.fit.value,
        "plan": str(fit.plan),
        **picked(fit.workload, "batch", "weight_dtype", "cache_dtype", "prefill_chunk"),
        "memory": to_plain(fit.memory),
        "largest_batch": fit.largest_batch,
        "largest_context": fit.context.positions,
        "is_context_of_model": fit.context.is_of_model,
        "context_plan": str(fit.context_plan),
        "reason": None,
    }


def slice_lines(result: SliceSearch) -> Iterator[str]:
    """The cheapest slice that meets the objective, the slices that were tried, and those that were not."""
    unit = "chips" if result.prices is None else "an hour"
    head = list[str]()
    if result.best is not None:
        price = result.price(result.best)
        cost = counted(int(price), "chip") if result.prices is None else f"{price:,.2f} {unit}"
        best = "cheapest" if result.has_limits or result.prices is None else "best"
        head = [f"{best}: {slice_name(result.best.space.topology)}, {cost}"]
    tables = ("\n".join(_tried_lines(result, unit)), "\n".join(_frontier_lines(result)))
    for part in with_first_block((*head, *filter(None, tables)), ""):
        yield from part.split("\n")
    yield ""


def _tried_lines(result: SliceSearch, unit: str) -> Iterator[str]:
    searches = sorted(result.searches, key=lambda one: one is not result.best)  # the answer first
    names = [slice_name(one.space.topology) for one in searches]
    prices = [f"{result.price(s):,.{0 if result.prices is None else 2}f}" for s in searches]
    widths = [max(10, *(len(n) + 1 for n in names)), max(8, *(len(p) + 1 for p in prices))]
    meets = f"{'meets':<6}" if result.has_limits else ""
    rate = f"{'tok/s/chip':>11}" if result.prices is None else f"{'$/M in':>8}{'$/M out':>8}"
    heads = f"{'slice':<{widths[0]}}{unit:>{widths[1]}}  {meets}"
    yield f"{heads}{'best plan':<20}{'TTFT':>9}{'TPOT':>9}{rate}"
    for search, name, price in zip(searches, names, prices, strict=True):
        choice, per_million = search.winner or search.closest, result.token_prices(search)
        head = f"{name:<{widths[0]}}{price:>{widths[1]}}  "
        head += f"{'no' if search.winner is None else 'yes':<6}" if result.has_limits else ""
        if choice is None:
            yield f"{head}does not fit"
            continue
        times = f"{format_seconds(choice.ttft_s):>9}{format_seconds(choice.tpot_s):>9}"
        rate = f"{choice.tokens_per_s_per_chip:>11,.0f}" if result.prices is None else ""
        if per_million is not None:
            rate = f"{per_million.input:>8.3f}{per_million.output:>8.2f}"
        yield f"{head}{choice.experiment.plan!s:<20}{times}{rate}"
    if result.n_skipped:
        more = "." if result.best is not None else ": --topology names them."
        yield f"And {counted(result.n_skipped, 'more expensive slice')}, not searched{more}"
    if result.n_too_slow:
        yield f"And {counted(result.n_too_slow, 'slice')} whose peak rates are too slow for the limits."
    if result.unpriced:
        yield f"Left out, without a price: {joined(list(result.unpriced))}."
    if result.prices is not None:
        yield from wrapped(
            "$/M in, out: dollars per million tokens, one full batch of requests after another; input "
            "tokens pay for the time of prefill, output tokens for decoding."
        )


def _frontier_lines(result: SliceSearch) -> Iterator[str]:
    """Cost against latency over all slices; none without prices."""
    if frontier := result.frontier():
        yield "frontier: no choice on any slice has a shorter TPOT and cheaper output tokens"
        yield f"{'TPOT':>9}{'TTFT':>9}{'$/M in':>8}{'$/M out':>8}  slice, plan, batch"
    for one, prices in frontier:
        times = f"{format_seconds(one.tpot_s):>9}{format_seconds(one.ttft_s):>9}"
        where = f"{slice_name(one.experiment.topology)} {one.experiment.plan}"
        batch = one.experiment.workload.batch
        yield f"{times}{prices.input:>8.3f}{prices.output:>8.2f}  {where}, batch {batch:,}"


def slices_document(result: SliceSearch) -> dict[str, Any]:
    """The slices that were tried, and how many were not."""
    tried = [
        {
            "slice": slice_name(search.space.topology),
            "topology": search.space.topology.name,
            "n_chips": search.space.topology.n_chips,
            "price_per_hour": None if result.prices is None else result.price(search),
            "meets": search.winner is not None,
            "price_per_million_output_tokens": result.price_per_million(search),
            "token_prices": to_plain(result.token_prices(search)),
            "best": None if search.winner is None else choice_document(search.winner),
            "fits": (search.winner or search.closest) is not None,
        }
        for search in result.searches
    ]
    return {
        "slices": tried,
        "frontier": [
            {
                "topology": one.experiment.topology.name,
                "token_prices": to_plain(prices),
                "choice": choice_document(one),
            }
            for one, prices in result.frontier()
        ],
        "n_slices_skipped": result.n_skipped,
        "n_slices_too_slow": result.n_too_slow,
        "unpriced": list(result.unpriced),
    }
