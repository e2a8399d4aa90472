"""What each kind of parallelism moves, for the four models of the proposal: `classes.parquet` of docs/evidence/study.

One plan of each kind on v6e, predicted: `python experiments/study_classes.py` (seconds).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

import meshscope
from meshscope.errors import MeshscopeError

OUT = Path(__file__).parents[1] / "docs" / "evidence" / "study" / "classes.parquet"
BATCH, PROMPT, OUTPUT = 256, 1024, 128
MODELS = (
    "deepseek-ai/DeepSeek-V3.1-Base",
    "deepseek-ai/DeepSeek-V4.1-Flash",
    "deepseek-ai/DeepSeek-V2-Lite",
    "Qwen/Qwen3-32B",
)
# A plan for each class, on 64 chips; `dp` alone moves nothing in inference but rows of the vocabulary.
PLANS = {
    "tp": "dp=8,tp=8", "sp": "dp=8,tp=8,sp", "pp": "pp=2,dp=8,tp=4", "dp": "dp=64",
    "ep": "dp=8,tp=8,ep=64", "cp": "cp=2,dp=4,tp=8", "fsdp": "fsdp=64",
}  # fmt: skip
SLICE = "v6e:8x8"
Row = dict[str, Any]

COLUMNS: dict[str, tuple[Any, str, str]] = {
    "model": (pl.String, "", "id of the model"),
    "topology": (pl.String, "", "slice"),
    "strategy": (pl.String, "", "the kind of parallelism that the plan is chosen for"),
    "plan": (pl.String, "", "plan"),
    "batch": (pl.Int32, "sequences", "sequences over all devices"),
    "prompt": (pl.Int32, "tokens", "input tokens of a sequence"),
    "refused": (pl.String, "", "why the plan is impossible; null if it is possible"),
    "fits": (pl.Boolean, "", "whether the memory of a device suffices"),
    "phase": (pl.String, "", "prefill or decode"),
    "class": (
        pl.String,
        "",
        "the parallelism that causes the collectives; several are joined by +",
    ),
    "count": (pl.Int32, "times", "collectives of a step"),
    "payload_bytes": (pl.Int64, "bytes", "payload of a step"),
    "wire_bytes": (pl.Float64, "bytes", "bytes that a device sends in a step"),
    "collective_s": (pl.Float64, "s", "duration of the collectives, hidden or not, predicted"),
    "step_s": (pl.Float64, "s", "duration of the step, predicted"),
    "low_s": (pl.Float64, "s", "lower bound of the step"),
    "high_s": (pl.Float64, "s", "upper bound of the step"),
}


def rows_of(model: str, strategy: str) -> Iterator[Row]:
    """A row for each phase and class, or one row with the reason why the plan is refused.

    A phase without collectives has a row of the plan's class with 0.
    """
    about: Row = {"model": model, "topology": SLICE, "strategy": strategy, "plan": PLANS[strategy]}
    about |= {"batch": BATCH, "prompt": PROMPT}
    options = {"batch": BATCH, "prompt": PROMPT, "output": OUTPUT}
    try:
        run = meshscope.predict(model, topology=SLICE, plan=PLANS[strategy], **options)
    except MeshscopeError as error:
        yield {**about, "refused": str(error)}
        return
    n, fits = pl.col("count"), run.as_dict()["memory"]["fits"]
    sums = {name: (n * pl.col(name)).sum() for name in ("payload_bytes", "wire_bytes")}
    table = (
        run.collectives.group_by("phase", pl.col("parallelism").alias("class"), maintain_order=True)
        .agg(n.sum().alias("n"), **sums, collective_s=(n * pl.col("dur_s")).sum())
        .rename({"n": "count"})
    )
    of_none = dict.fromkeys(("count", "payload_bytes", "wire_bytes", "collective_s"), 0)
    silent = [p for p in ("prefill", "decode") if p not in set(table["phase"])]
    for row in [
        *table.iter_rows(named=True),
        *({"phase": p, "class": strategy, **of_none} for p in silent),
    ]:
        name = {"prefill": "prefill_s", "decode": "decode_step_s"}[row["phase"]]
        low_s, high_s = run.time.intervals[name]
        times = {"step_s": getattr(run.time, name), "low_s": low_s, "high_s": high_s}
        yield {**about, "refused": None, "fits": fits, **row, **times}


def main() -> None:
    """Predicts every model and plan, and writes the table."""
    rows = [row for model in MODELS for strategy in PLANS for row in rows_of(model, strategy)]
    schema = {name: dtype for name, (dtype, _, _) in COLUMNS.items()}
    pl.DataFrame(rows, schema=schema).write_parquet(OUT)


if __name__ == "__main__":
    main()
