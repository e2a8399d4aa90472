"""Worker process that compiles StableHLO for described slices, one program after the other.

Started as `python -m meshscope.backends.compile.function_worker`. Each line of standard input names a request
file; the answer on standard output is `done` once the HLO text and the report, or an error report, are
written. The process stays alive between programs, as starting the compiler takes longer than compiling a
small one.
"""

import gzip
import json
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshscope.backends.compile.worker import (
    GZIP_LEVEL,
    set_environment,
    slice_devices,
)
from meshscope.hardware.topology import parse_topology
from meshscope.workers import error_report, reported

DONE = "done"
PACKAGES = ("jax", "jaxlib", "libtpu")


def compile_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles the program of a request, writes its HLO text, and returns the report."""
    from meshscope.programs.jax.stablehlo import compile_stablehlo, memory_analysis

    started = time.perf_counter()
    compiled = compile_stablehlo(
        Path(request["stablehlo"]).read_bytes(),
        slice_devices(parse_topology(request["topology"])),
        options=request["options"],
    )
    compiled_at = time.perf_counter()
    with gzip.open(request["text"], "wt", GZIP_LEVEL, encoding="utf-8") as file:
        file.write(compiled.as_text())
    return {
        "seconds": {"compile": compiled_at - started},
        "memory": memory_analysis(compiled),
        "versions": {name: version(name) for name in PACKAGES},
    }


def main() -> int:
    """Compiles requests until standard input closes."""
    set_environment()
    for line in sys.stdin:
        file = Path(line.rstrip("\n"))
        request = json.loads(file.read_text(encoding="utf-8"))
        reported(
            lambda request=request: compile_request(request),
            Path(request["report"]),
            error_report(file),
        )
        sys.stdout.write(f"{DONE}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
