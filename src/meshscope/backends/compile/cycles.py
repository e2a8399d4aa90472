"""libtpu's static cycle profile: cycles of each HLO operation, from its scheduled instruction bundles.

An internal flag makes libtpu write one file per operation. It makes compilation ten times slower, may
change with any version, and omits most loop iterations inside kernels. It is a second opinion on the
`estimated_cycles` in the HLO text.
"""

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

FLAG = "--xla_jf_dump_static_llo_profile_to"
_ESTIMATE = re.compile(
    r'hlo_op_estimate\s*\{[^}]*?hlo_op_name:\s*"([^"]+)"[^}]*?estimated_cycles:\s*(\d+)', re.DOTALL
)


class Cycles(StrEnum):
    """The source of the cycles in compute times."""

    ESTIMATED = "estimated"  # `estimated_cycles` in the HLO text
    PROFILE = "profile"  # the static cycle profile, for operations that have one


def profiling_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of a worker whose compiler writes its cycle profile to `folder`."""
    flags = environment.get("LIBTPU_INIT_ARGS", "")
    return {**environment, "LIBTPU_INIT_ARGS": f"{flags} {FLAG}={folder}".strip()}


def read_profile(folder: Path) -> dict[str, int]:
    """Cycles by the name of the HLO operation; empty if no file has the known format."""
    cycles_of: dict[str, int] = {}
    for path in sorted(folder.glob("*.textproto")):
        for name, cycles in _ESTIMATE.findall(path.read_text(encoding="utf-8", errors="replace")):
            cycles_of[name] = int(cycles)
    return cycles_of


def write_profile(path: Path, profile: Mapping[str, int]) -> None:
    """Writes the profile as JSON, cycles by operation name."""
    path.write_text(json.dumps(dict(profile)), encoding="utf-8")
