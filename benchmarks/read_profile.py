"""Times reading XPlane profiles of one million events, and measures memory relative to the file.

Run `python benchmarks/read_profile.py` on an idle machine: it reports wall time, and CPU time next
to it. A fresh process reads each profile; its memory is the growth of its peak resident size since
before opening the file, mapped pages included. The bounds are 5 s and twice the file. A second
figure includes extracting the ops. The last line is a JSON document.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from synthetic_profile import write_profile

N_EVENTS = 1_000_000
N_RUNS = 3
MAX_S, MAX_RATIO = 5.0, 2.0

# VmHWM instead of ru_maxrss, which starts at the peak of the parent process.
READ = """
import json, sys, time
from pathlib import Path
import numpy, polars
from meshscope.readers.profile.xplane import read_xspace
def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
polars.DataFrame({"warm": [1]}).with_columns(polars.col("warm") + 1)
before = peak_bytes()
started, started_cpu = time.perf_counter(), time.process_time()
space = read_xspace(Path(sys.argv[1]))
read_s, read_cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
read_bytes = peak_bytes() - before
from meshscope.readers.profile.ops import ops_of
started = time.perf_counter()
ops = ops_of(space)
print(json.dumps({
    "read_s": read_s,
    "read_cpu_s": read_cpu_s,
    "peak_bytes": read_bytes,
    "ops_s": time.perf_counter() - started,
    "ops_peak_bytes": peak_bytes() - before,
    "n_ops": len(ops.events),
    "n_events": sum(len(plane.events) for plane in space.planes),
    "table_bytes": sum(plane.events.estimated_size() for plane in space.planes),
}))
"""


def reading(path: Path) -> dict[str, float]:
    """The fastest of several runs, each in a fresh process."""
    runs = [
        json.loads(subprocess.check_output([sys.executable, "-c", READ, str(path)]))
        for _ in range(N_RUNS)
    ]
    return min(runs, key=lambda run: run["read_s"])


def main() -> None:
    """Prints seconds and ratios for a TPU and a CPU profile."""
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for backend in ("tpu", "cpu"):
            path = Path(scratch) / f"{backend}.xplane.pb"
            write_profile(path, n_events=N_EVENTS, backend=backend)
            result = reading(path)
            result["file_bytes"] = path.stat().st_size
            result["memory_ratio"] = result["peak_bytes"] / result["file_bytes"]
            results[backend] = result
            print(
                f"{backend}: {result['n_events']:,} events, {result['file_bytes'] / 1e6:.0f} MB: "
                f"{result['read_s']:.2f} s (bound {MAX_S:.0f}; {result['read_cpu_s']:.2f} s of CPU), memory {result['memory_ratio']:.2f} x "
                f"the file (bound {MAX_RATIO:.0f}), tables {result['table_bytes'] / 1e6:.0f} MB; "
                f"ops {result['ops_s']:.2f} s more, memory then "
                f"{result['ops_peak_bytes'] / result['file_bytes']:.2f} x"
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
