"""Markdown tables of docs/serving.md, simulated when cog prints them."""

import sys
from collections.abc import Iterator, Sequence

import meshscope
from meshscope.units import format_seconds

RATE = 40.0
SPLITS = ("together", "1:7", "2:6", "3:5", "4:4", "5:3", "6:2", "7:1")
PATHS = ("dcn", "ici")


def apart_or_together() -> None:
    """Prints 8 instances of v6e:2x2, together and apart: stable rate, and times at one rate."""
    heads = ["prefill:decode", "over", "stable", "TTFT p50", "TTFT p99", "TPOT p50", "ITL p99"]
    _print(heads, [list(_cells(split, path)) for split, path in _cases()])


def _cases() -> Iterator[tuple[str, str]]:
    for split in SPLITS:
        yield split, "" if split == "together" else PATHS[0]
    yield "6:2", PATHS[1]


def _cells(split: str, path: str) -> Iterator[str]:
    options = {"instances": 8} if split == "together" else {"apart": split, "transfer": path}
    served = meshscope.serve_sim(
        "Qwen/Qwen3-32B", topology="v6e-4", plan="tp=4", rate=RATE, requests=2000, **options
    )
    result = served.outcome.result
    figures = result.figures
    yield split
    yield path
    yield f"{result.saturated_per_s:.3g}/s"
    if not result.is_stable:
        yield from ["queue grows"] * 4
        return
    assert figures.ttft is not None
    assert figures.tpot is not None
    assert figures.itl is not None
    for seconds in (
        figures.ttft.p50_s, figures.ttft.p99_s, figures.tpot.p50_s, figures.itl.p99_s
    ):  # fmt: skip
        yield format_seconds(seconds)


def _print(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [heads, ["---"] * len(heads), *rows]
    sys.stdout.writelines(f"| {' | '.join(line)} |\n" for line in lines)
