"""Experiment files: each combination of model, slice and variant is a case, compiled once and kept.

A case stores its scheduled HLO and the compiler's report in `runs/STUDY/CASE/`; stored cases are not
compiled again.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshscope.backends.compile.compile import compile_experiment
from meshscope.errors import CompileError
from meshscope.events.enums import Phase
from meshscope.hardware.topology import parse_topology
from meshscope.model.catalog import catalog
from meshscope.model.config import model_from_config
from meshscope.plans.dispatch import DispatchForm
from meshscope.plans.experiment import Experiment, experiment_of
from meshscope.plans.kernel_choice import Kernels
from meshscope.plans.plan import parse_plan
from meshscope.plans.program import Loop, Partitioner, Program
from meshscope.plans.workload import Workload

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program of a study: model, slice, variant and folder."""

    study: str
    model: str
    way: str
    experiment: Experiment
    phase: Phase
    flags: str

    @property
    def n_devices(self) -> int:
        """Number of devices of the slice."""
        return self.experiment.topology.n_devices

    @property
    def folder(self) -> Path:
        """The folder of the scheduled HLO and the compiler's report."""
        parts = (self.model, self.experiment.topology.name, self.way)
        name = "-".join(parts).replace(":", "-").replace(",", "").replace(" ", "_")
        return ROOT / "runs" / self.study / name

    @property
    def hlo(self) -> Path:
        """The file of the scheduled HLO."""
        return self.folder / f"{self.phase}.hlo.txt.gz"

    @property
    def report(self) -> Path:
        """The file of the compiler's report: memory, versions, seconds."""
        return self.folder / f"{self.phase}.json"

    @property
    def is_compiled(self) -> bool:
        """Whether the case has a program or a refusal."""
        return self.report.exists() or self.refusal.exists()

    @property
    def refusal(self) -> Path:
        """The compiler's message if it refused the program."""
        return self.folder / "refused.txt"


def cases_of(file: Path) -> Iterator[Case]:
    """The cases of an experiment file, slice by slice."""
    study = yaml.safe_load(file.read_text(encoding="utf-8"))
    for topology in study["slices"]:
        for model in study["models"]:
            for way in study["ways"]:
                yield Case(
                    study=file.stem,
                    model=model,
                    way=way,
                    experiment=_experiment(study, topology, model, study["ways"][way]),
                    phase=Phase(study["phase"]),
                    flags=study["ways"][way].get("flags", ""),
                )


def _experiment(
    study: Mapping[str, Any], topology: str, model: str, way: Mapping[str, Any]
) -> Experiment:
    slice_ = parse_topology(topology)
    n = slice_.n_devices
    declared = study["models"][model]
    entry = catalog()[declared["catalog"]]
    replaced = {key: _filled(value, n) for key, value in declared["config"].items()}
    return experiment_of(
        model=model_from_config({**entry.config, **replaced}, name=model, source=entry.source),
        plan=parse_plan(study["plan"].format(n=n)),
        topology=slice_,
        workload=Workload(batch=study["sequences_a_device"] * n, prompt=study["prompt"], output=1),
        program=Program(
            partitioner=Partitioner(way.get("partitioner", "manual")),
            loop=Loop(way.get("loop", "auto")),
            dispatch=DispatchForm(way.get("dispatch", "auto")),
            capacity_factor=way.get("capacity_factor"),
            kernels=Kernels(study["kernels"]),
        ),
        n_layers=way.get("n_layers"),
    )


def _filled(value: Any, n: int) -> Any:
    """A value of a config; text with `{n}` is the number of devices."""
    return int(value.format(n=n)) if isinstance(value, str) else value


def compile_case(case: Case) -> None:
    """Compiles the case unless it is stored; a refusal is stored as its message."""
    if case.is_compiled:
        return
    case.folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    os.environ["LIBTPU_INIT_ARGS"] = case.flags
    try:
        compile_experiment(case.experiment, case.folder, progress=lambda *_: None)
        text = json.dumps(case.experiment.as_dict(), indent=1)
        (case.folder / "experiment.json").write_text(text, encoding="utf-8")
    except CompileError as error:
        case.refusal.write_text(str(error), encoding="utf-8")
    sys.stderr.write(f"{case.folder.name}: {time.monotonic() - started:.0f} s\n")
