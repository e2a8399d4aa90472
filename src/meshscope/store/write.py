"""Writes a run into a folder: events.parquet, metrics.json, and the manifest last."""

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from meshscope.events.schema import SCHEMA_VERSION, table_of
from meshscope.serialize import to_plain
from meshscope.store.folder import MANIFEST, TOOL
from meshscope.store.run import RunRecord, manifest_as_dict

EVENTS = "events.parquet"
METRICS = "metrics.json"
HLO = "hlo"
DIGEST = "digest"  # key of the manifest


def write_run(folder: Path, run: RunRecord, *, metrics: Mapping[str, Any]) -> None:
    """Fills `folder`, which may hold `hlo/` already; `metrics` are figures derived from the rows."""
    write_table(table_of(run.rows), folder / EVENTS)
    figures = {"memory": to_plain(run.memory)}
    if run.measured is not None:
        figures["measured"] = to_plain(run.measured)
    if run.times:
        figures["times"] = to_plain(run.times)
    write_json(folder / METRICS, {**figures, **metrics})
    head = {"tool": TOOL, "schema": SCHEMA_VERSION}
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    hashes = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    manifest = {**head, **manifest_as_dict(run.manifest), "files": hashes}
    write_json(folder / MANIFEST, {**manifest, DIGEST: manifest_digest(manifest)})


def write_table(frame: pl.DataFrame, path: Path) -> None:
    """Writes the table as Parquet; OSError on a full disk.

    The file is encoded in memory first: polars reports a full disk as a fault of the Parquet format.
    """
    content = io.BytesIO()
    frame.write_parquet(content)
    path.write_bytes(content.getbuffer())


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes the file in one step: a truncated manifest would not identify the folder as a run."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def manifest_digest(document: Mapping[str, Any]) -> str:
    """The SHA-256 of all other keys of a manifest, in hex, whatever their order."""
    keys = {key: value for key, value in document.items() if key != DIGEST}
    return hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
