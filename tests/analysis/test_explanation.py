"""Changes by phase, axis and part sum to the totals of both sides."""

from fractions import Fraction

from made import collective

from meshscope.analysis.comparison import phase_changes
from meshscope.analysis.totals import step_totals
from meshscope.events.enums import Kind, Part, Phase


def made(kind: Kind, part: Part, *, n: int = 8, count: int = 1, axis: str = "tp"):
    return collective(kind, (n,), part=part, axis=axis, count=count)


LEFT = [made(Kind.ALL_REDUCE, Part.MLP, count=3), made(Kind.ALL_GATHER, Part.ATTN, axis="dp")]
RIGHT = [
    made(Kind.REDUCE_SCATTER, Part.MLP, count=3),
    made(Kind.ALL_GATHER, Part.MLP, count=3),
    made(Kind.ALL_GATHER, Part.ATTN, axis="dp", n=80),
]


def test_places_sum_to_the_totals_of_both_sides() -> None:
    (change,) = phase_changes(LEFT, RIGHT, left_costs={}, right_costs={})
    totals = [step_totals(rows)[Phase.PREFILL] for rows in (LEFT, RIGHT)]
    assert change.wire_bytes == (totals[0].wire_bytes, totals[1].wire_bytes)
    assert change.count == (totals[0].count, totals[1].count)
    assert (
        sum(place.wire_change for place in change.places)
        == totals[1].wire_bytes - totals[0].wire_bytes
    )


def test_the_largest_change_comes_first() -> None:
    (change,) = phase_changes(LEFT, RIGHT, left_costs={}, right_costs={})
    assert [(place.axis, place.part) for place in change.places] == [("dp", "attn"), ("tp", "mlp")]
    assert change.places[0].wire_change == Fraction(3, 4) * 144
    assert change.places[1].wire_change == 0
    assert change.places[1].left != change.places[1].right
    assert change.places[1].right.kinds == (("all_gather", 3), ("reduce_scatter", 3))


def test_a_side_without_rows_is_all_missing() -> None:
    (change,) = phase_changes(LEFT, [], left_costs={}, right_costs={})
    assert change.wire_bytes[1] == 0
    assert change.count == (4, 0)
