"""A small run for queries."""

import pytest
from made import collective

from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.plans.experiment_record import record_from_dict
from meshscope.store.run import Manifest, RunRecord


@pytest.fixture
def predicted_run() -> RunRecord:
    layered = tuple(
        collective(Kind.ALL_REDUCE, (8, 64), phase=phase, layer=layer, part=part, n_steps=n_steps)
        for phase, n_steps, layers in ((Phase.PREFILL, 1, 3), (Phase.DECODE, 9, 1))
        for part in (Part.ATTN, Part.MLP)
        for layer in range(layers)
    )
    last = collective(
        Kind.ALL_GATHER, (8, 512), phase=Phase.DECODE, layer=None, part=Part.LM_HEAD, n_steps=9
    )
    manifest = Manifest(
        source=Source.PREDICTED,
        experiment=record_from_dict({"plan": "tp=4", "mesh": {"tp": 4}, "topology": "v6e:2x2", "n_devices": 4, "n_chips": 4, "imported": ["a.txt"]}),
        phases=(Phase.PREFILL, Phase.DECODE),
        command=("meshscope", "predict"),
        created="2026-01-02T03:04:05+00:00",
        versions={"meshscope": "0"},
        flags={},
    )  # fmt: skip
    return RunRecord(path=None, manifest=manifest, rows=(*layered, last), memory={})
