"""The expected compile time is that of the most similar run in the same folder."""

import json
import os
from dataclasses import replace
from pathlib import Path

from meshscope.events.enums import Phase, Source
from meshscope.hardware.topology import parse_topology
from meshscope.plans.experiment_record import ExperimentRecord, LayerForm, NamedModel
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Engine, Partitioner, Program
from meshscope.plans.workload import Workload
from meshscope.store.folder import MANIFEST, TOOL
from meshscope.store.history import earlier_compile
from meshscope.store.run import Manifest, manifest_as_dict

EXPERIMENT = ExperimentRecord(
    model=NamedModel(name="m", n_layers=4),
    engine=Engine.MESHSCOPE,
    program=Program(),
    layers_are=LayerForm.SCANNED,
    topology=parse_topology("v6e:2x4"),
    plan=parse_plan("tp=8"),
    workload=Workload(),
)
SECONDS = {"prefill.compile": 8.0, "prefill.read": 2.0, "decode.compile": 5.0}
OTHER_PLAN = replace(EXPERIMENT, plan=parse_plan("tp=4,dp=2"))


def keep(
    folder: Path,
    name: str,
    experiment: ExperimentRecord = EXPERIMENT,
    *,
    age_s: float = 0.0,
    **other: object,
) -> None:
    """Writes the manifest of a compiled run, with other values for some of its keys."""
    manifest = Manifest(
        source=Source.COMPILED,
        experiment=experiment,
        phases=(Phase.PREFILL, Phase.DECODE),
        command=("meshscope",),
        created="",
        versions={},
        flags={},
        seconds=SECONDS,
    )
    (folder / name).mkdir()
    path = folder / name / MANIFEST
    path.write_text(json.dumps({"tool": TOOL, **manifest_as_dict(manifest), **other}))
    os.utime(path, (1e9 - age_s, 1e9 - age_s))


def test_the_steps_of_a_phase_are_added(tmp_path: Path) -> None:
    keep(tmp_path, "a")
    earlier = earlier_compile(EXPERIMENT, tmp_path)
    assert (earlier.name, earlier.phase_s) == ("a", {Phase.PREFILL: 10.0, Phase.DECODE: 5.0})


def test_the_slowest_of_concurrent_programs_counts(tmp_path: Path) -> None:
    keep(tmp_path, "a", seconds=SECONDS | {"prefill.unrolled.compile": 30.0})
    earlier = earlier_compile(EXPERIMENT, tmp_path)
    assert earlier.phase_s == {Phase.PREFILL: 30.0, Phase.DECODE: 5.0}


def test_the_most_similar_run_counts_then_the_newest(tmp_path: Path) -> None:
    keep(tmp_path, "other-plan", OTHER_PLAN)
    keep(tmp_path, "old", age_s=50)
    keep(tmp_path, "new", age_s=10)
    earlier = earlier_compile(EXPERIMENT, tmp_path)
    assert earlier.name == "new"
    earlier = earlier_compile(OTHER_PLAN, tmp_path)
    assert earlier.name == "other-plan"


def test_another_model_or_program_is_no_estimate(tmp_path: Path) -> None:
    keep(tmp_path, "model", replace(EXPERIMENT, model=NamedModel(name="other", n_layers=4)))
    keep(tmp_path, "layers", replace(EXPERIMENT, model=NamedModel(name="m", n_layers=5)))
    keep(tmp_path, "auto", replace(EXPERIMENT, program=Program(partitioner=Partitioner.AUTO)))
    keep(tmp_path, "unrolled", replace(EXPERIMENT, layers_are=LayerForm.UNROLLED))
    keep(tmp_path, "predicted", source="predicted")
    keep(tmp_path, "nothing-timed", seconds={})
    keep(tmp_path, "words", seconds={"prefill.compile": "long"})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / MANIFEST).write_bytes(b"{")
    assert earlier_compile(EXPERIMENT, tmp_path) is None
    assert earlier_compile(EXPERIMENT, tmp_path / "missing") is None
