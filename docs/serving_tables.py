"""Markdown tables of docs/serving.md and docs/evidence/serving.md, simulated when cog prints them."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import meshscope
from meshscope.units import format_seconds

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from published_serving import (
    PublishedServing,
    fitted_host_s,
    published_serving,
    simulated_serving,
)

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


def published_runs() -> None:
    """Prints the errors of simulated runs of sglang-jax by slice and half, for the fitted time of the host."""
    host_s = fitted_host_s()
    rows: list[list[str]] = []
    for topology in dict.fromkeys(run.topology for run in published_serving()):
        for is_fitted in (True, False):
            runs = [
                run
                for run in published_serving()
                if (run.topology, run.is_fitted, run.itl_s is not None)
                == (topology, is_fitted, True)
            ]
            half = "fitted" if is_fitted else "holdout"
            rows.append([topology, half, str(len(runs)), *_errors(runs, host_s)])
    _print(["slice", "half", "runs", "ITL", "TTFT", "output tokens/s"], rows)
    sys.stdout.write(f"\nTime of the host in a step, fitted: {format_seconds(host_s)}.\n")


def _errors(runs: Sequence[PublishedServing], host_s: float) -> Iterator[str]:
    """Median and worst error of each figure."""
    for name in ("itl_s", "ttft_s", "output_tokens_per_s"):
        errors = [
            getattr(simulated_serving(run, host_s), name) / getattr(run, name) - 1 for run in runs
        ]
        yield f"{median(map(abs, errors)):.0%}, at most {max(errors, key=abs):+.0%}"


def published_holdout() -> None:
    """Prints the holdout runs, published and simulated."""
    host_s = fitted_host_s()
    heads = ["slice", "in flight", "prompt", "ITL", "", "TTFT", "", "output tokens/s", ""]
    rows = [
        [
            run.topology,
            str(run.concurrency),
            f"{run.prompt:,}",
            format_seconds(run.itl_s),
            format_seconds(simulated_serving(run, host_s).itl_s or 0.0),
            format_seconds(run.ttft_s),
            format_seconds(simulated_serving(run, host_s).ttft_s),
            f"{run.output_tokens_per_s:,.0f}",
            f"{simulated_serving(run, host_s).output_tokens_per_s:,.0f}",
        ]
        for run in published_serving()
        if run.itl_s is not None and not run.is_fitted
    ]
    _print(heads, rows)
