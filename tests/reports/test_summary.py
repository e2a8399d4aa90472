"""The table of memory: its rows add up to its total."""

import pytest

from meshscope.api.predict import predict
from meshscope.events.enums import Source
from meshscope.reports.summary import memory_table

PARTS = ("weights", "KV cache", "temporaries", "padding, other")


@pytest.mark.parametrize(
    ("model", "has_padding"), [("DeepSeek-V2-Lite", True), ("Llama-3.1-8B", False)]
)
def test_the_parts_of_the_memory_add_up_to_the_total(model: str, *, has_padding: bool) -> None:
    """DeepSeek-V2-Lite with tp=8 pads its experts, 176 columns in rows of 256."""
    run = predict(model, topology="v6e-8", plan="tp=8", batch=32, prompt=1024)
    table = memory_table({Source.PREDICTED: run.record.memory[Source.PREDICTED]})
    rows = {str(row[0]): row[1] for row in table.rows}
    assert ("padding, other" in rows) == has_padding
    parts = [rows[name] for name in PARTS if name in rows]
    assert len(parts) == 3 + has_padding
    assert rows["total"] == sum(part for part in parts if isinstance(part, int | float))
