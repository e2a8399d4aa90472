"""16-bit collectives that a backend performs in float32."""

from dataclasses import replace

from made import collective

from meshscope.analysis.comparison import promoted
from meshscope.analysis.join import compare
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Source

PREDICTED = collective(Kind.ALL_REDUCE, (2, 8))


def compiled(dtype: str, n_bytes: int) -> Collective:
    wire_bytes = PREDICTED.wire_bytes * n_bytes / 32
    return replace(
        PREDICTED, source=Source.COMPILED, dtype=dtype, payload_bytes=n_bytes, wire_bytes=wire_bytes
    )


def test_a_promoted_collective_is_predicted_in_float32() -> None:
    rows = [compiled("f32", 64)]
    predicted, count = promoted([PREDICTED], rows)
    assert count == 1
    assert compare(predicted, rows).is_exact


def test_a_collective_that_stays_16_bit_is_unchanged() -> None:
    for rows in ([compiled("bf16", 32)], [compiled("bf16", 32), compiled("f32", 64)], []):
        assert promoted([PREDICTED], rows) == ((PREDICTED,), 0)
