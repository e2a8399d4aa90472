"""A small run: predicted, and compiled with one difference of each verdict."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from made import collective, varied
from tables import stored

from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.plans.experiment_record import record_from_dict
from meshscope.plans.memory import Memory
from meshscope.store.run import Manifest, RunRecord

DATA = Path(__file__).parent / "data"
TEMP = {"temp_bytes": 2**29, "total_bytes": 2**31, "hbm_bytes": 2**34}
MEMORY = Memory(weights_bytes=2**30, kv_cache_bytes=2**29, fits=True, **TEMP)


def _row(kind: Kind, part: Part, layer: int | None, shape: tuple[int, ...]) -> Collective:
    return collective(kind, shape, layer=layer, part=part)


PREDICTED = (
    _row(Kind.ALL_REDUCE, Part.EMBED, None, (2, 8, 64)),
    *(_row(Kind.ALL_REDUCE, Part.ATTN, i, (2, 8, 64)) for i in range(3)),
    *(_row(Kind.REDUCE_SCATTER, Part.MLP, i, (2, 8, 64)) for i in range(3)),
    _row(Kind.ALL_GATHER, Part.LM_HEAD, None, (2, 512)),
    replace(_row(Kind.ALL_GATHER, Part.LM_HEAD, None, (2, 512)), phase=Phase.DECODE, n_steps=9),
)


def _compiled(row: Collective) -> list[Collective]:
    done = replace(
        row,
        source=Source.COMPILED,
        opcode=row.kind.replace("_", "-"),
        algorithm="Emitter/StrategyRing, 2 colors",
        source_line="/home/me/src/meshscope/programs/decoder.py:7",
        inserted_by="partitioner",
        is_async=False,
    )
    match row.part, row.phase:
        case Part.MLP, _:
            return [replace(done, opcode="all-reduce", wire_bytes=done.wire_bytes * 2)]
        case Part.ATTN, _ if row.layer == 1:
            return [replace(done, kind=Kind.REDUCE_SCATTER, opcode="reduce-scatter")]
        case Part.EMBED, _:
            indices = replace(done, kind=Kind.ALL_GATHER, opcode="all-gather", dtype="s32")
            return [done, replace(indices, shape=(4,), payload_bytes=16, wire_bytes=Fraction(12))]
        case _, Phase.DECODE:
            return []
        case _:
            return [done]


@pytest.fixture(scope="session")
def predicted_run() -> RunRecord:
    manifest = Manifest(
        source=Source.PREDICTED,
        experiment=record_from_dict(stored(DATA / "experiment.yaml")),
        phases=(Phase.PREFILL, Phase.DECODE),
        command=("meshscope", "predict"),
        created="2026-01-02T03:04:05+00:00",
        versions={"meshscope": "0"},
        flags={},
    )
    unknown = replace(MEMORY, temp_bytes=None, total_bytes=None, fits=None)
    return RunRecord(
        path=None, manifest=manifest, rows=PREDICTED, memory={Source.PREDICTED: unknown}
    )


@pytest.fixture(scope="session")
def compiled_run(predicted_run: RunRecord) -> RunRecord:
    compiled = tuple(done for row in PREDICTED for done in _compiled(row))
    memory = {**predicted_run.memory, Source.COMPILED: MEMORY}
    manifest, rows = {"source": Source.COMPILED}, (*PREDICTED, *compiled)
    return varied(predicted_run, manifest=manifest, rows=rows, memory=memory)
