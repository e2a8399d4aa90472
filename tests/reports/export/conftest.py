"""Runs to export: predictions of real models, and one with hostile texts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from made import experiment_with, varied

from meshscope.cost.collectives import predict
from meshscope.cost.memory import predicted_memory
from meshscope.events.collective import Collective
from meshscope.events.enums import Phase, Source
from meshscope.store.run import Manifest, RunRecord

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
def timed_run() -> RunRecord:
    """A run with times: every collective takes 2 us and starts 3 us after the previous one."""
    run = predicted()
    rows = list[Collective]()
    for phase in Phase:
        of_phase = (row for row in run.rows if row.phase is phase)
        times = {"dur_s": 2e-6, "time_basis": "interconnect_model"}
        rows += (replace(row, start_s=5e-6 * i, **times) for i, row in enumerate(of_phase))
    return replace(run, rows=tuple(rows))
