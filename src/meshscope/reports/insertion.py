"""Why the partitioner inserted each collective, as lines of text."""

from collections.abc import Iterator, Sequence

from meshscope.analysis.insertion import Insertion
from meshscope.events.enums import Kind
from meshscope.readers.hlo.collective_matmul import ALGORITHM
from meshscope.reports.budget import row_line
from meshscope.reports.plain import plain
from meshscope.reports.words import counted
from meshscope.reports.wrapping import wrapped
from meshscope.units import format_seconds


def insertion_lines(explained: Sequence[Insertion]) -> Iterator[str]:
    """The sum first, then each collective with its cost, its shardings and what avoids it.

    Collectives that the plan has are only counted.
    """
    n = sum(one.row.count for one in explained)
    if not n:
        yield "the partitioner inserted no collective"
        return
    planned = [one for one in explained if one.is_planned]
    explained = [one for one in explained if not one.is_planned]
    if planned:
        n_planned = sum(one.row.count for one in planned)
        yield (
            f"{n_planned} of the {counted(n, 'collective')} of the partitioner are those of the plan; "
            "compare lists them"
        )
        n -= n_planned
    if not n:
        return
    exposed = [one.exposed_s for one in explained]
    known = sum(s for s in exposed if s is not None)
    cost = "" if None in exposed else f", exposed {format_seconds(known)} per step"
    beyond = " beyond the plan" if planned else ""
    yield f"the partitioner inserted {counted(n, 'collective')}{beyond}{cost}"
    for one in explained:
        yield ""
        yield from wrapped(row_line(one.row))
        for line in _details(one):
            yield from wrapped(plain(line), indent=2)


def _details(one: Insertion) -> Iterator[str]:
    if one.exposed_s is not None and one.total_s is not None:
        hidden = "" if one.hidden_frac is None else f", {one.hidden_frac:.0%} hidden behind compute"
        yield f"cost: {format_seconds(one.total_s)} per step{hidden}"
    if one.row.algorithm == ALGORITHM:
        yield "a collective matmul: decomposed into permutes between the pieces of the product"
    elif one.is_of_product:
        yield (
            "no collective matmul: the product waits for the whole array"
            if one.row.kind is Kind.ALL_GATHER
            else "no collective matmul: nothing is sent before the product is whole"
        )
    yield f"operand: {one.operand}; wanted: {one.wanted}"
    if one.remedy is not None:
        yield f"remedy: {one.remedy}"
