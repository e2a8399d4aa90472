"""Totals of a step and of a request: the parts sum to the whole."""

from dataclasses import replace
from fractions import Fraction

from meshscope.analysis.totals import Total, request_totals, step_totals
from meshscope.events.collective import Collective, predicted_collective
from meshscope.events.enums import REQUEST_PHASES, Kind, Part, Phase


def _row(
    phase: Phase,
    kind: Kind,
    *,
    n_elements: int,
    count: int = 1,
    n_steps: int = 1,
    group: tuple[int, ...] = (0, 1, 2),
) -> Collective:
    return predicted_collective(
        phase=phase,
        layer=0,
        part=Part.MLP,
        kind=kind,
        axis="tp",
        groups=(group,),
        dtype="bf16",
        shape=(n_elements,),
        count=count,
        n_steps=n_steps,
    )


ROWS = [
    _row(Phase.PREFILL, Kind.ALL_REDUCE, n_elements=100, count=2),
    _row(Phase.PREFILL, Kind.ALL_GATHER, n_elements=30),
    _row(Phase.DECODE, Kind.ALL_REDUCE, n_elements=5, count=4, n_steps=127),
]


def test_a_step_counts_every_operation_once() -> None:
    assert step_totals(ROWS) == {
        Phase.PREFILL: Total(
            count=3,
            payload_bytes=2 * 200 + 60,
            wire_bytes=2 * 200 * Fraction(4, 3) + 60 * Fraction(2, 3),
            n_unsized=0,
        ),
        Phase.DECODE: Total(count=4, payload_bytes=40, wire_bytes=40 * Fraction(4, 3), n_unsized=0),
    }


def test_a_request_counts_every_step() -> None:
    step, request = step_totals(ROWS), request_totals(ROWS)
    decode = step[Phase.DECODE]
    assert request == {
        Phase.PREFILL: step[Phase.PREFILL],
        Phase.DECODE: Total(
            count=127 * decode.count,
            payload_bytes=127 * decode.payload_bytes,
            wire_bytes=127 * decode.wire_bytes,
            n_unsized=0,
        ),
    }


def test_the_parts_sum_to_the_whole() -> None:
    whole = request_totals(ROWS)
    parts = [request_totals([row]) for row in ROWS]
    for phase, total in whole.items():
        of_phase = [part[phase] for part in parts if phase in part]
        for name in ("count", "payload_bytes", "wire_bytes", "n_unsized"):
            assert sum(getattr(part, name) for part in of_phase) == getattr(total, name)


def test_a_transfer_is_sent_once() -> None:
    sent, received = (
        _row(Phase.DECODE, kind, n_elements=8, group=(0, 1)) for kind in (Kind.SEND, Kind.RECV)
    )
    total = step_totals([sent, received])[Phase.DECODE]
    assert (total.count, total.wire_bytes) == (2, 16)


def test_collectives_without_phase_or_size_are_counted_separately() -> None:
    unknown = replace(ROWS[2], phase=None, shape=None, payload_bytes=None, wire_bytes=None)
    totals = request_totals([*ROWS, unknown])
    assert totals[None] == Total(
        count=4 * 127, payload_bytes=0, wire_bytes=Fraction(0), n_unsized=4 * 127
    )
    assert {phase: totals[phase] for phase in REQUEST_PHASES} == request_totals(ROWS)


def test_no_rows_have_no_totals() -> None:
    assert request_totals([]) == {}
