"""16-bit collectives that a backend carries out in float32."""

from dataclasses import replace

from meshscope.analysis.join import compare
from meshscope.analysis.promotion import promotion_of
from meshscope.events.collective import Collective, predicted_collective
from meshscope.events.enums import Kind, Part, Phase, Source

ASKED = predicted_collective(
    phase=Phase.PREFILL,
    layer=0,
    part=Part.MLP,
    kind=Kind.ALL_REDUCE,
    axis="tp",
    groups=((0, 1, 2, 3),),
    dtype="bf16",
    shape=(2, 8),
)


def found(dtype: str, n_bytes: int) -> Collective:
    assert ASKED.wire_bytes is not None
    wire_bytes = ASKED.wire_bytes * n_bytes / 32
    return replace(
        ASKED, source=Source.COMPILED, dtype=dtype, payload_bytes=n_bytes, wire_bytes=wire_bytes
    )


def test_what_was_carried_out_in_float32_is_asked_in_float32() -> None:
    rows = [found("f32", 64)]
    promotion = promotion_of([ASKED], rows)
    assert promotion.count == 1
    assert compare(promotion.rows, rows).is_exact


def test_what_stayed_16_bit_stays() -> None:
    assert promotion_of([ASKED], [found("bf16", 32)]).rows == (ASKED,)
    assert promotion_of([ASKED], [found("bf16", 32), found("f32", 64)]).count == 0
    assert promotion_of([ASKED], []).rows == (ASKED,)
