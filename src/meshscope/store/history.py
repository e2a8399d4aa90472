"""Compile times of earlier runs in a folder, read from their manifests."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshscope.errors import MeshscopeError
from meshscope.events.enums import Phase, Source
from meshscope.files import MAX_STORED_BYTES, read_json
from meshscope.plans.experiment_record import ExperimentRecord
from meshscope.store.folder import MANIFEST, TOOL
from meshscope.store.run import Manifest, manifest_from_dict

MAX_RUNS = 200  # manifests read, newest first

# The first must be equal for the compile time to carry over; the more of the second, the better.
_SAME = ("model_name", "n_layers", "engine", "program", "layers_are")
_ALIKE = ("topology", "plan", "workload", "kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierCompile:
    """Seconds that each phase of an earlier run took to compile, and the name of that run."""

    name: str
    phase_s: Mapping[Phase, float]


def earlier_compile(experiment: ExperimentRecord, folder: Path) -> EarlierCompile | None:
    """The most similar run in this folder that compiled the same model the same way, or None.

    Of several equally similar runs the newest counts. A run copied from a faster or slower machine
    is not recognized as such.
    """

    def n_equal(manifest: Manifest, names: tuple[str, ...]) -> int:
        return sum(getattr(experiment, n) == getattr(manifest.experiment, n) for n in names)

    same = [(n, m) for n, m in _compiled(folder) if n_equal(m, _SAME) == len(_SAME)]
    if not same:
        return None
    name, manifest = max(same, key=lambda one: n_equal(one[1], _ALIKE))  # the first of equal ones
    return EarlierCompile(name=name, phase_s=_by_phase(manifest.seconds))


def _compiled(folder: Path) -> Iterator[tuple[str, Manifest]]:
    """Names and manifests of compiled runs with compile times, newest first.

    Others are skipped, also damaged and removed ones, because only a time estimate depends on them.
    """
    ages: dict[Path, float] = {}
    for path in folder.glob(f"*/{MANIFEST}"):
        with suppress(OSError):
            ages[path] = -path.stat().st_mtime
    for path in sorted(ages, key=lambda path: ages[path])[:MAX_RUNS]:
        with suppress(OSError, ValueError, MeshscopeError):
            document = read_json(path, MAX_STORED_BYTES)
            if isinstance(document, dict) and document.get("tool") == TOOL:
                manifest = manifest_from_dict(document)
                if manifest.source is Source.COMPILED and manifest.seconds:
                    yield path.parent.name, manifest


def _by_phase(seconds: Mapping[str, float]) -> dict[Phase, float]:
    """The seconds of each phase, whose steps are named `phase.step` or `phase.program.step`.

    The programs of a phase compile concurrently, so the slowest counts.
    """
    programs: defaultdict[str, float] = defaultdict(float)
    for name, step_s in seconds.items():
        programs[name.rpartition(".")[0]] += step_s
    by_phase: defaultdict[Phase, float] = defaultdict(float)
    for program, program_s in programs.items():
        phase = program.partition(".")[0]
        if phase in set(Phase):
            by_phase[Phase(phase)] = max(program_s, by_phase[Phase(phase)])
    return dict(by_phase)
