"""A calibrated chip: fitted constants, measured rates, and the conditions of the measurement."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshscope.errors import ParseError, RunError
from meshscope.events.enums import Kind
from meshscope.files import check_new, new_file, read_json
from meshscope.hardware.interconnect.constants import LinkConstants
from meshscope.serialize import FormatError, from_plain, to_plain

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedKind:
    """One alpha-beta fit and the relative errors of its fitted and holdout points."""

    kind: Kind
    group_size: int
    latency_s: float
    # Over the published peak's; for one shared memory, seconds per byte moved.
    inverse_bandwidth: float
    n_fitted: int
    n_holdout: int
    median_error_frac: float
    largest_error_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRate:
    """FLOP/s of one device in n x n matrix products on all devices at once."""

    n: int
    dtype: str
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRate:
    """Bytes/s of one device that reads and writes an array, on all devices at once."""

    array_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipProfile:
    """The result of a calibration; `constants` feed `collective_time`."""

    chip: str
    topology: str
    plan: str
    constants: LinkConstants
    fits: tuple[FittedKind, ...]
    points: tuple[
        Mapping[str, Any], ...
    ]  # {axis, kind, group_size, payload_bytes, seconds, algbw, busbw}, in SI units
    matrices: tuple[MatrixRate, ...]
    memory: tuple[MemoryRate, ...]
    conditions: Mapping[str, Any]
    connection_s: float | None = None  # two devices of consecutive stages before their first send

    @property
    def flops_per_s(self) -> float | None:
        """The best measured matrix rate of one device."""
        return max((rate.flops_per_s for rate in self.matrices), default=None)

    @property
    def memory_bytes_per_s(self) -> float | None:
        """The measured memory rate of one device, with the largest array."""
        largest = max(self.memory, key=lambda rate: rate.array_bytes, default=None)
        return None if largest is None else largest.bytes_per_s


def profile_folder() -> Path:
    """The folder of this user's profiles: `$XDG_DATA_HOME/meshscope/profiles`."""
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "meshscope" / "profiles"


def check_place(path: Path, *, force: bool) -> None:
    """RunError if a profile cannot be written to `path`; call it before a long measurement."""
    check_new(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"'{path.parent}' is not a writable folder ({error.strerror}). Give another --out."
        ) from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise RunError(f"'{path}' cannot be written. Give a file in a writable folder with --out.")


def save_profile(profile: ChipProfile, path: Path, *, force: bool) -> None:
    """Writes the profile; RunError as `new_file`."""
    document = {"schema": SCHEMA, **to_plain(profile)}
    with new_file(path, force=force) as partial:
        partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_profile(path: Path) -> ChipProfile:
    """The profile that `meshscope calibrate` wrote; ParseError for any other file."""
    try:
        document = read_json(path)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            remedy = "Create one with this version's 'meshscope calibrate'."
            raise ParseError(f"{path}: not a profile of schema {SCHEMA}. {remedy}")
        return from_plain(ChipProfile, document)
    except FileNotFoundError:
        reason = "no such file"
        remedy = f"Create a profile with 'meshscope calibrate --out {path}'."
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        remedy = "Give a profile of 'meshscope calibrate'."
    except FormatError as error:
        reason = f"a part of the profile is missing or damaged ({error})"
        remedy = "Run 'meshscope calibrate' again."
    except ValueError as error:
        reason, remedy = f"not a profile ({error})", "Run 'meshscope calibrate' again."
    raise ParseError(f"{path}: {reason}. {remedy}")
