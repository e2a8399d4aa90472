"""A hash of a StableHLO program that stays the same if the code that compiles it moves.

JAX gives the end of a program the source line of its caller. The lines of the function itself count:
tables show them.
"""

import hashlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

_LOCATION = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)')
_NOWHERE = '"":0:0'


def program_digest(module: Any) -> str:
    """The hash of a StableHLO module with its source locations, without those of the present callers."""
    callers = set(_callers())

    def kept(match: re.Match[str]) -> str:
        place = (match[1], int(match[2]), int(match[3]))
        return _NOWHERE if place in callers else match[0]

    text = module.operation.get_asm(enable_debug_info=True)
    return hashlib.sha256(_LOCATION.sub(kept, text).encode()).hexdigest()


def _callers() -> Iterator[tuple[str, int, int]]:
    """File, line and column of every call on the stack of this thread."""
    frame = inspect.currentframe()
    while frame is not None:
        positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        line, _, column, _ = positions
        if line is not None and column is not None:
            yield frame.f_code.co_filename, line, column
        frame = frame.f_back
