"""Reads a run folder; every fault of a folder is one RunError with the remedy."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from shlex import join
from typing import Any

import polars as pl

from meshscope.errors import MeshscopeError, RunError
from meshscope.events.collective import Collective
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.events.measured import Measured
from meshscope.events.schema import POLARS_SCHEMA, SCHEMA_VERSION, checked_table
from meshscope.events.step_time import StepTime
from meshscope.files import MAX_STORED_BYTES, read_object
from meshscope.plans.memory import Memory
from meshscope.serialize import from_plain, picked
from meshscope.store import run as runs
from meshscope.store.folder import MANIFEST, TOOL, partial_name
from meshscope.store.run import Manifest, RunRecord, manifest_from_dict
from meshscope.store.write import DIGEST, EVENTS, METRICS, manifest_digest, sha256

_MAKE_AGAIN = "Make the run again, with --force."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """The keys of metrics.json that are read back; the others follow from the rows."""

    memory: dict[Source, Memory]
    measured: Measured | None = None
    times: tuple[StepTime, ...] = ()


def read_run(path: Path) -> RunRecord:
    """The run in this folder; RunError if it is missing, half-written, damaged or of another schema."""
    document = _read_document(path)
    manifest = _manifest(document, path)
    frame = _read_events(path, document)
    metrics = read_object(path / METRICS, _MAKE_AGAIN, MAX_STORED_BYTES, kind=RunError)
    try:
        stored = {key: metrics[key] for key in _Figures.__slots__ if key in metrics}
        figures = from_plain(_Figures, stored)
        rows = tuple(_collectives(frame))
    except (TypeError, ValueError, MeshscopeError) as error:
        raise _damaged(path, document, error) from error
    _check_hash(path, document, METRICS)
    parts = None
    if manifest.speculation is not None:
        home = path / runs.SPECULATION
        verify, draft = (read_run(home / part) for part in (runs.VERIFY, runs.DRAFT))
        parts = runs.SpeculativeRuns(verify=verify, draft=draft)
    facts = picked(figures, *_Figures.__slots__)
    return RunRecord(path=path, manifest=manifest, rows=rows, **facts, speculative=parts)


def read_events(path: Path) -> pl.DataFrame:
    """The event table of the run in this folder; RunError as `read_run`."""
    return _read_events(path, _read_document(path))


def read_manifest(path: Path) -> Manifest:
    """The manifest of the run in this folder; RunError as `read_run`."""
    return _manifest(_read_document(path), path)


def _read_document(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise RunError(f"no run at {str(path)!r}. Give the folder of a run, as compile prints it.")
    if (name := partial_name(path)) is not None:
        raise RunError(
            f"'{path}' is half-written: the command that makes '{name}' is running or was "
            "interrupted. Wait for it, or run it again."
        )
    if not (path / MANIFEST).is_file():
        raise RunError(f"'{path}' is not a run: it has no {MANIFEST}. Give the folder of a run.")
    document = read_object(path / MANIFEST, _MAKE_AGAIN, MAX_STORED_BYTES, kind=RunError)
    if document.get("tool") != TOOL:
        raise RunError(f"'{path}' is not a run: another tool wrote its {MANIFEST}.")
    if document.get("schema") != SCHEMA_VERSION:
        raise RunError(
            f"run '{path}' has schema {document.get('schema')}, this version reads {SCHEMA_VERSION}. "
            f"{_remedy(document, path)}"
        )
    if not (path / EVENTS).is_file():
        raise RunError(f"run '{path}' has no {EVENTS}. {_remedy(document, path)}")
    _check_hash(path, document, EVENTS)  # the Parquet reader may panic on a damaged file
    return document


def _check_hash(path: Path, document: Mapping[str, Any], name: str) -> None:
    files = document.get("files")
    if sha256(path / name) != (files.get(name) if isinstance(files, dict) else None):
        raise RunError(f"run '{path}': {name} is damaged or was changed. {_remedy(document, path)}")


def _manifest(document: Mapping[str, Any], path: Path) -> Manifest:
    try:
        manifest = manifest_from_dict(document)
    except (ValueError, MeshscopeError) as error:
        raise _damaged(path, document, error) from error
    # Manifests of earlier versions have no digest.
    if document.get(DIGEST, manifest_digest(document)) != manifest_digest(document):
        raise RunError(
            f"run '{path}': {MANIFEST} was changed after the run, so its events may belong to another "
            f"experiment. {_remedy(document, path)}"
        )
    return manifest


def _damaged(path: Path, document: Mapping[str, Any], error: Exception) -> RunError:
    return RunError(f"run '{path}' is damaged: {str(error).rstrip('.')}. {_remedy(document, path)}")


def _remedy(document: Mapping[str, Any], path: Path) -> str:
    """The command that makes the run again in its present folder."""
    command = document.get("command")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        return _MAKE_AGAIN
    home = path.parents[1] if path.parent.name == runs.SPECULATION else path  # of a part: its run
    words: list[str] = []
    is_value = False
    for word in command:
        if not is_value and word not in {"--force", "--out"} and not word.startswith("--out="):
            words.append(word)
        is_value = not is_value and word == "--out"
    return f"Make it again: {join([*words, '--out', str(home), '--force'])}"


def _read_events(path: Path, document: Mapping[str, Any]) -> pl.DataFrame:
    try:
        frame = pl.read_parquet(path / EVENTS)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise RunError(
            f"run '{path}': cannot read {EVENTS}: {error}. {_remedy(document, path)}"
        ) from error
    return checked_table(frame, str(path / EVENTS))


# How the values of a row become a collective's.
_TYPED: dict[str, Callable[[Any], Any]] = {
    "source": Source,
    "phase": Phase,
    "part": Part,
    "kind": Kind,
    "groups": lambda groups: tuple(map(tuple, groups)),
    "shape": tuple,
}
_NULLABLE = ("phase", "part", "shape")


def _collectives(frame: pl.DataFrame) -> Iterator[Collective]:
    names = [name for name in Collective.__slots__ if name in POLARS_SCHEMA]
    for row in frame.drop_nulls("kind").select(names).iter_rows(named=True):
        for name, typed in _TYPED.items():
            if row[name] is not None or name not in _NULLABLE:
                row[name] = typed(row[name])
        if row["wire_bytes"] is not None:  # exact: wire factors have the group size as denominator
            most = max(1, row["group_size"] or 1)
            row["wire_bytes"] = Fraction(row["wire_bytes"]).limit_denominator(most)
        yield Collective(**row)
