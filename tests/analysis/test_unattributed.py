"""What could not be placed is counted with its reason."""

from dataclasses import replace

from meshscope.analysis.totals import NO_REASON, Unattributed, unattributed
from meshscope.events.collective import predicted_collective
from meshscope.events.enums import Kind, Part, Phase

ROW = predicted_collective(
    phase=Phase.DECODE,
    layer=None,
    part=Part.EMBED,
    kind=Kind.ALL_REDUCE,
    axis="tp",
    groups=((0, 1),),
    dtype="bf16",
    shape=(4, 8),
)


def test_attributed_rows_count_nothing() -> None:
    assert unattributed([ROW, ROW]) == Unattributed(count=0, payload_bytes=0, reasons=())


def test_a_missing_phase_part_or_axis_is_counted_with_its_reason_and_bytes() -> None:
    rows = [
        ROW,
        replace(ROW, axis=None, axis_reason="no axis has these groups", count=3),
        replace(ROW, part=None, axis_reason="no scope", payload_bytes=None),
        replace(ROW, phase=None),
    ]
    assert unattributed(rows) == Unattributed(
        count=5,
        payload_bytes=(3 + 1) * 4 * 8 * 2,
        reasons=(("no axis has these groups", 3), ("no scope", 1), (NO_REASON, 1)),
    )


def test_a_caveat_of_the_reader_counts_even_if_everything_is_known() -> None:
    doubtful = replace(ROW, axis_reason="how often the loop runs is unknown")
    assert unattributed([doubtful]).reasons == (("how often the loop runs is unknown", 1),)


def test_layers_need_not_be_known() -> None:
    assert unattributed([replace(ROW, layer=None)]).count == 0
