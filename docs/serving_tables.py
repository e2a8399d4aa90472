"""Markdown tables of docs/serving.md and docs/evidence/serving.md, simulated when cog prints them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import meshscope
from meshscope.units import format_seconds

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from published_serving import PublishedServing, error, published_serving, simulated_serving

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
    """Prints the errors of simulated runs by server, chip and half."""
    groups = dict.fromkeys(
        (run.server, run.chip, run.is_fitted)
        for run in published_serving()
        if not run.is_inference_x
    )
    rows: list[list[str]] = []
    for server, chip, is_fitted in sorted(groups):
        runs = [
            run
            for run in published_serving()
            if (run.server, run.chip, run.is_fitted) == (server, chip, is_fitted)
            and not run.is_inference_x
        ]
        half = "fitted" if is_fitted else "holdout"
        rows.append([server, chip, half, str(len(runs)), *map(_errors(runs), FIGURES)])
    _print(["server", "chip", "half", "runs", "ITL", "TPOT", "TTFT", "output tokens/s"], rows)


FIGURES = ("itl_s", "tpot_s", "ttft_s", "output_tokens_per_s")


def _errors(runs: Sequence[PublishedServing]) -> Callable[[str], str]:
    """Median and worst error of a figure over the runs that publish it."""

    def cell(name: str) -> str:
        errors = [one for run in runs if (one := error(run, name)) is not None]
        if not errors:
            return ""
        return f"{median(map(abs, errors)):.0%}, at most {max(errors, key=abs):+.0%}"

    return cell


def inference_x() -> None:
    """Prints each point of InferenceX, published and simulated."""
    _run_table([run for run in published_serving() if run.is_inference_x], ["plan", "half"])


def published_holdout() -> None:
    """Prints the holdout runs, published and simulated."""
    runs = [run for run in published_serving() if not (run.is_inference_x or run.is_fitted)]
    _run_table([run for run in runs if run.output > 1], ["server", "model", "topology", "plan"])


def _run_table(runs: Sequence[PublishedServing], names: Sequence[str]) -> None:
    heads = [*names, "in flight", "prompt"]
    for figure in ("ITL", "TPOT", "TTFT", "output tokens/s"):
        heads += [figure, "ours"]
    rows: list[list[str]] = []
    for run in runs:
        half = {"half": "fitted" if run.is_fitted else "holdout"}
        cells = [half[name] if name in half else str(getattr(run, name)) for name in names]
        cells += [str(run.concurrency), f"{run.prompt:,}"]
        for name in FIGURES:
            published = getattr(run.medians, name)
            simulated = getattr(simulated_serving(run), name)
            known = published is not None
            form = format_seconds if name.endswith("_s") and "tokens" not in name else _rate
            cells += [form(published), form(simulated)] if known else ["", ""]
        rows.append(cells)
    _print(heads, rows)


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}"
