"""The compiler's cycle profile, on request: what it makes of its own instruction bundles, an operation each.

An internal flag of libtpu makes it evaluate the bundles that it schedules, and write one small file an
HLO operation. That takes ten times as long as compiling, may change with any libtpu, and leaves out
most of what loops inside kernels do; it is a second opinion on the estimates that every program carries.
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
    """Whose cycles the time of compiled work rests on."""

    ESTIMATED = "estimated"  # what the compiler writes on its instructions
    PROFILE = "profile"  # its profile of its own bundles, where it writes one


def profiling_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of a child whose compiler is to write its cycle profile into `folder`."""
    flags = environment.get("LIBTPU_INIT_ARGS", "")
    return {**environment, "LIBTPU_INIT_ARGS": f"{flags} {FLAG}={folder}".strip()}


def read_profile(folder: Path) -> dict[str, int]:
    """Cycles by the name of the HLO operation; empty where the compiler wrote nothing that we understand."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob("*.textproto")):
        for name, cycles in _ESTIMATE.findall(path.read_text(encoding="utf-8", errors="replace")):
            found[name] = int(cycles)
    return found


def keep_profile(path: Path, profile: Mapping[str, int]) -> None:
    """Writes the profile beside the program that it is of."""
    path.write_text(json.dumps(dict(profile)), encoding="utf-8")
