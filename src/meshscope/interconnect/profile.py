"""A chip as it was measured: constants for collectives, rates of matrices and memory, and under which conditions."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshscope.errors import ParseError, RunError
from meshscope.events.enums import Kind
from meshscope.interconnect.constants import (
    LinkConstants,
)
from meshscope.interconnect.stored import constants_from_dict

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedKind:
    """What one fit gave: a line and the relative errors of the points, fitted and held out.

    `slowness` is time over that of the published peak; for devices that share a memory it is
    seconds a byte moved.
    """

    kind: Kind | None  # None: all kinds together
    group_size: int
    floor_s: float
    slowness: float
    n_fitted: int
    n_judged: int
    median_error_frac: float
    largest_error_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRate:
    """Square matrices of `n` multiplied on every device at once: flops a second of one device."""

    n: int
    dtype: str
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRate:
    """An array read and written on every device at once: bytes a second of one device."""

    array_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipProfile:
    """The measured chip; `constants` is what `collective_time` takes.

    `points` are rows {axis, kind, group_size, payload_bytes, seconds, algbw, busbw}, in SI units.
    """

    chip: str
    topology: str
    plan: str
    constants: LinkConstants
    fits: tuple[FittedKind, ...]
    points: tuple[Mapping[str, Any], ...]
    matrices: tuple[MatrixRate, ...]
    memory: tuple[MemoryRate, ...]
    conditions: Mapping[str, Any]

    @property
    def flops_per_s(self) -> float | None:
        """The best rate of matrices that was measured, of one device."""
        return max((rate.flops_per_s for rate in self.matrices), default=None)

    @property
    def memory_bytes_per_s(self) -> float | None:
        """The rate of the largest array that was read and written, of one device."""
        largest = max(self.memory, key=lambda rate: rate.array_bytes, default=None)
        return None if largest is None else largest.bytes_per_s


def profile_folder() -> Path:
    """Where profiles of this user lie: `$XDG_DATA_HOME/meshscope/profiles`."""
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "meshscope" / "profiles"


def check_place(path: Path, *, force: bool) -> None:
    """RunError where a profile could not be written, or another is there; for before hours of measuring."""
    if path.exists() and not force:
        raise RunError(f"'{path}' exists. Give another --out, or --force to replace it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"'{path.parent}' is no folder to write to ({error.strerror}).") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise RunError(f"'{path}' cannot be written. Give a file in a folder of yours with --out.")


def save_profile(profile: ChipProfile, path: Path, *, force: bool) -> None:
    """Writes the profile whole or not at all; RunError as of `check_place`."""
    check_place(path, force=force)
    partial = path.with_name(f".{path.name}.partial")
    document = {"schema": SCHEMA, **asdict(profile)}
    partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def load_profile(path: Path) -> ChipProfile:
    """The profile in a file that `meshscope calibrate` wrote; ParseError where it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParseError(
            f"{path}: no such file. Make a profile with 'meshscope calibrate --out {path}'."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ParseError(f"{path}: not a profile ({error}). Make it anew.") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ParseError(
            f"{path}: not a profile of schema {SCHEMA}. Make it with this version's 'meshscope calibrate'."
        )
    try:
        return _profile(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ParseError(
            f"{path}: a profile with a part missing or damaged ({error!r}). Make it anew."
        ) from None


def _profile(document: Mapping[str, Any]) -> ChipProfile:
    return ChipProfile(
        chip=document["chip"],
        topology=document["topology"],
        plan=document["plan"],
        constants=constants_from_dict(document["constants"]),
        fits=tuple(_fitted_kind(fit) for fit in document["fits"]),
        points=tuple(document["points"]),
        matrices=tuple(MatrixRate(**rate) for rate in document["matrices"]),
        memory=tuple(MemoryRate(**rate) for rate in document["memory"]),
        conditions=document["conditions"],
    )


def _fitted_kind(told: Mapping[str, Any]) -> FittedKind:
    kind = told["kind"]
    fields: dict[str, Any] = {**told, "kind": None if kind is None else Kind(kind)}
    return FittedKind(**fields)
