"""What earlier runs of a folder took: from their manifests alone, to say how long the next one will take."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshscope.events.enums import Phase, Source
from meshscope.store.folder import MANIFEST, TOOL

MAX_RUNS = 200  # whose manifests are read, the newest

# What decides how long a compilation takes has to be the same; of the runs with the same, the one in
# which most of the others are the same, too, tells.
_SAME = ("engine", "program", "layers_are")
_ALIKE = ("topology", "plan", "workload", "kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """The seconds that each phase of an earlier run took to compile, and the name of that run."""

    name: str
    phase_s: Mapping[Phase, float]


def earlier_compile(experiment: Mapping[str, Any], folder: Path) -> Earlier | None:
    """The run in this folder that compiled the same model in the same way, or None.

    `experiment` is as the manifest holds it. The run that is most alike counts, and of several the
    newest; how long it took on this machine nobody knows, where runs were brought here.
    """
    found = [
        (_likeness(experiment, told["experiment"]), -age, path.name, told["seconds"])
        for age, (path, told) in enumerate(_compiled(folder))
        if _is_same(experiment, told["experiment"])
    ]
    if not found:
        return None
    _, _, name, seconds = max(found)
    return Earlier(name=name, phase_s=_by_phase(seconds))


def _compiled(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Runs with the seconds of a compilation, the newest first; what is no run is passed over."""
    manifests = sorted(folder.glob(f"*/{MANIFEST}"), key=_changed_s, reverse=True)
    for path in manifests[:MAX_RUNS]:
        told = _read(path)
        is_compiled = told.get("tool") == TOOL and told.get("source") == Source.COMPILED
        if is_compiled and isinstance(told.get("experiment"), dict) and _has_seconds(told):
            yield path.parent, told


def _has_seconds(told: Mapping[str, Any]) -> bool:
    seconds = told.get("seconds")
    return isinstance(seconds, dict) and bool(seconds) and all(map(_is_number, seconds.values()))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it went meanwhile
        return 0.0


def _read(path: Path) -> dict[str, Any]:
    """The manifest; nothing where it is damaged, for only an estimate hangs on it."""
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _is_same(asked: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _model(asked) == _model(other) and all(asked.get(k) == other.get(k) for k in _SAME)


def _model(experiment: Mapping[str, Any]) -> tuple[Any, Any]:
    model = experiment.get("model")
    model = model if isinstance(model, dict) else {}
    return model.get("name"), model.get("layers")


def _likeness(asked: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    return sum(asked.get(key) == other.get(key) for key in _ALIKE)


def _by_phase(seconds: Mapping[str, Any]) -> dict[Phase, float]:
    """The sum of each phase's steps, which are called `phase.step`."""
    return {
        phase: sum(s for name, s in seconds.items() if name.startswith(f"{phase}."))
        for phase in Phase
        if any(name.startswith(f"{phase}.") for name in seconds)
    }
