"""manifest.json as a typed Manifest, and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshscope.events.enums import Phase, Source
from meshscope.serialize import from_plain, to_plain
from meshscope.spec.experiment_record import record_from_dict
from meshscope.spec.model.shallow import ShallowLayers
from meshscope.store.run import Manifest

_FOLDER_KEYS = (
    "tool",
    "schema",
    "files",
    "digest",
)  # written by the store, no part of the manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredManifest:
    """The keys of manifest.json in their order."""

    source: Source
    phases: tuple[Phase, ...]
    created: str
    command: tuple[str, ...]
    versions: dict[str, str]
    flags: dict[str, str]
    seconds: dict[str, float]
    experiment: dict[str, Any]
    timed_layers: ShallowLayers | None = None


def manifest_as_dict(manifest: Manifest) -> dict[str, Any]:
    """Plain values, by the keys of manifest.json."""
    stored = _StoredManifest(
        source=manifest.source,
        phases=manifest.phases,
        created=manifest.created,
        command=manifest.command,
        versions=dict(manifest.versions),
        flags=dict(manifest.flags),
        seconds=dict(manifest.seconds),
        experiment=manifest.experiment.as_dict(),
        timed_layers=manifest.timed_layers,
    )
    return to_plain(stored)


def manifest_from_dict(document: Mapping[str, Any]) -> Manifest:
    """The manifest that `manifest_as_dict` wrote; FormatError or MeshscopeError for anything else."""
    keys = {key: value for key, value in document.items() if key not in _FOLDER_KEYS}
    stored = from_plain(_StoredManifest, keys)
    return Manifest(
        source=stored.source,
        experiment=record_from_dict(stored.experiment),
        phases=stored.phases,
        command=stored.command,
        created=stored.created,
        versions=stored.versions,
        flags=stored.flags,
        seconds=stored.seconds,
        timed_layers=stored.timed_layers,
    )
