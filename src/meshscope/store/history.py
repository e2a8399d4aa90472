"""Compile times of earlier runs in a folder, read from their manifests."""

from collections.abc import Iterator, Mapping
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
    candidates = [
        (
            sum(getattr(experiment, n) == getattr(manifest.experiment, n) for n in _ALIKE),
            -age,
            name,
            manifest.seconds,
        )
        for age, (name, manifest) in enumerate(_compiled(folder))
        if all(getattr(experiment, n) == getattr(manifest.experiment, n) for n in _SAME)
    ]
    if not candidates:
        return None
    _, _, name, seconds = max(candidates, key=lambda candidate: candidate[:2])
    return EarlierCompile(name=name, phase_s=_by_phase(seconds))


def _compiled(folder: Path) -> Iterator[tuple[str, Manifest]]:
    """Names and manifests of compiled runs with compile times, newest first; others are skipped."""
    manifests = sorted(folder.glob(f"*/{MANIFEST}"), key=_changed_s, reverse=True)
    for path in manifests[:MAX_RUNS]:
        manifest = _read(path)
        if manifest is not None and manifest.source is Source.COMPILED and manifest.seconds:
            yield path.parent.name, manifest


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _read(path: Path) -> Manifest | None:
    """The manifest; None if it is damaged, because only a time estimate depends on it."""
    try:
        document = read_json(path, MAX_STORED_BYTES)
        is_run = isinstance(document, dict) and document.get("tool") == TOOL
        return manifest_from_dict(document) if is_run else None
    except (OSError, ValueError, MeshscopeError):
        return None


def _by_phase(seconds: Mapping[str, float]) -> dict[Phase, float]:
    """The seconds of each phase, whose steps are named `phase.step` or `phase.program.step`.

    The programs of a phase compile concurrently, so the slowest counts.
    """
    programs: dict[str, float] = {}
    for name, step_s in seconds.items():
        program = name.rpartition(".")[0]
        programs[program] = programs.get(program, 0.0) + step_s
    by_phase: dict[Phase, float] = {}
    for program, program_s in programs.items():
        phase = program.partition(".")[0]
        if phase in set(Phase):
            by_phase[Phase(phase)] = max(program_s, by_phase.get(Phase(phase), 0.0))
    return by_phase
