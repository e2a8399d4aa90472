"""Runs to export: predictions of real models, and one with hostile texts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from made import experiment_with, varied

from meshscope.cost.collectives import predict
from meshscope.cost.memory import predicted_memory
from meshscope.events.enums import Source
from meshscope.store.read import read_run
from meshscope.store.run import Manifest, RunRecord
from meshscope.store.write import EVENTS, write_run

HOSTILE = '</script><script>alert("x")</script>\'"\x00\x1b[31m\u202e\r\n,=' + "x" * 1_000_000

MakeRun = Callable[..., RunRecord]


@pytest.fixture
def make_run() -> MakeRun:
    return predicted


def predicted(
    model: str = "meta-llama/Llama-3.1-8B",
    *,
    plan: str = "tp=4,dp=2",
    topology: str = "v6e-8",
    n_layers: int = 2,
) -> RunRecord:
    """A predicted run in memory."""
    experiment = experiment_with(
        model, plan, topology, batch=8, prompt=64, output=10, n_layers=n_layers
    )
    manifest = Manifest(
        source=Source.PREDICTED,
        experiment=experiment.record,
        phases=experiment.phases,
        command=("meshscope", "predict"),
        created="2026-01-02T03:04:05+00:00",
        versions={"meshscope": "0"},
        flags={},
    )
    memory = {Source.PREDICTED: predicted_memory(experiment)}
    return RunRecord(path=None, manifest=manifest, rows=tuple(predict(experiment)), memory=memory)


@pytest.fixture
def hostile_run() -> RunRecord:
    """A run with hostile text in every text column."""
    run = predicted(plan="tp=8")
    rows = tuple(
        replace(
            row, hlo_name=HOSTILE, source_line=HOSTILE, algorithm=HOSTILE, opcode=HOSTILE,
            axis=HOSTILE, axis_reason=HOSTILE, dtype=HOSTILE,
        )
        for row in run.rows
    )  # fmt: skip
    changes = {"flags": {"XLA_FLAGS": HOSTILE}, "versions": {"libtpu": HOSTILE}}
    return varied(run, manifest=changes, rows=rows)


@pytest.fixture
def timed_run(tmp_path: Path) -> RunRecord:
    """A stored run with times: every collective takes 2 us and starts 3 us after the previous one."""
    run = predicted()
    folder = tmp_path / "timed"
    folder.mkdir()
    write_run(folder, run, metrics={})
    events = pl.read_parquet(folder / EVENTS)
    index = pl.int_range(pl.len()).over("phase")
    timed = events.with_columns(
        (index * 5e-6).alias("start_s"),
        pl.lit(2e-6).alias("dur_s"),
        pl.lit("interconnect_model").alias("time_basis"),
    )
    return replace(run, rows=_with_events(folder, timed), path=folder)


def _with_events(folder: Path, events: pl.DataFrame):
    import json  # noqa: PLC0415

    from meshscope.store.write import sha256  # noqa: PLC0415

    events.write_parquet(folder / EVENTS)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][EVENTS] = sha256(folder / EVENTS)
    manifest.pop("digest")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return read_run(folder).rows
