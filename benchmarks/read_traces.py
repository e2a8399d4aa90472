"""Imports traces of ten million events in eight files, and compares with other tools on equal files.

`python benchmarks/read_traces.py` writes XPlane, Kineto and Chrome files of a quarter, a half and
all of the events, imports each set in a fresh process, and prints events per second, the peak of
the summed memory of its processes, and the growth from the quarter to the whole. `--against PYTHON`
runs HolisticTraceAnalysis and TraceLens, whichever the environment of that Python has, on smaller
Kineto files, with the same question, and prints all answers. The last line is a JSON document.
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from synthetic_profile import write_profile

N_EVENTS = 10_000_000
N_FILES = 8
N_AGAINST = 800_000  # events; the other tool needs minutes for more
TOPOLOGY, PLAN = "v6e:4x8", "dp=8,tp=4"  # of the XPlanes and Chrome traces: 4 chips a file
MAX_S, MAX_BYTES = 60.0, 4e9

IMPORT = """
import json, sys, time
import meshscope
started = time.perf_counter()
options = json.loads(sys.argv[1])
run = meshscope.import_(sys.argv[3:], out=sys.argv[2], force=True, **options)
seconds = time.perf_counter() - started
rows = [r for r in run.record.rows if r.source == "measured"]
loads = run.record.measured.loads
print(json.dumps({
    "seconds": seconds,
    "n_events": run.record.measured.trace.n_events,
    "n_ops": run.record.measured.trace.n_ops,
    "collective_s": sum(load.collective_s for load in loads),
    "exposed_s": sum((r.exposed_s or 0) * r.count * r.n_steps for r in rows),
    "all_s": sum((r.dur_s or 0) * r.count * r.n_steps for r in rows),
    "n_devices": len({load.device for load in loads}),
}))
"""
HTA = """
import json, sys, time, warnings, logging
warnings.filterwarnings("ignore"); logging.disable(logging.CRITICAL)
started = time.perf_counter()
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
overlap = analysis.get_comm_comp_overlap(visualize=False)
print(json.dumps({
    "seconds": time.perf_counter() - started,
    "overlap_frac": float(overlap["comp_comm_overlap_pctg"].mean()) / 100,
}))
"""
# Its least work for the question: no tree of operators, only the events of the GPU.
TRACELENS = """
import json, sys, time
from pathlib import Path
started = time.perf_counter()
from TraceLens import DataLoader, PytorchGPUEventAnalyser
exposed_us = all_us = 0.0
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    events = DataLoader.load_data(str(path))["traceEvents"]
    for index, event in enumerate(events):
        event["UID"] = index
    metrics = PytorchGPUEventAnalyser(events).compute_metrics()
    exposed_us += metrics["exposed_comm_time"]
    all_us += metrics["total_comm_time"]
print(json.dumps({
    "seconds": time.perf_counter() - started,
    "overlap_frac": 1 - exposed_us / all_us,
}))
"""
OTHERS = {  # tool: its module and the program that answers
    "HolisticTraceAnalysis": ("hta", HTA),
    "TraceLens": ("TraceLens", TRACELENS),
}


def write_xplanes(folder: Path, n_events: int) -> list[Path]:
    """One host of four chips in each file; all hosts count their chips from 0."""
    first = folder / "host0.xplane.pb"
    write_profile(first, n_events=n_events // N_FILES, backend="tpu")
    return [first, *_copies(first, [folder / f"host{n}.xplane.pb" for n in range(1, N_FILES)])]


def _copies(first: Path, others: list[Path]) -> Iterator[Path]:
    for other in others:
        shutil.copyfile(first, other)
        yield other


def write_kineto(folder: Path, n_events: int) -> list[Path]:
    """One rank in each file: operators, launches and kernels, one kernel in eight an all-reduce."""
    body = ",\n".join(_kineto_events(n_events // N_FILES, random.Random(4)))
    paths: list[Path] = []
    for rank in range(N_FILES):
        path = folder / f"rank{rank}.pt.trace.json"
        info = {"backend": "nccl", "rank": rank, "world_size": N_FILES}
        with path.open("w", encoding="utf-8") as file:
            file.write(f'{{"schemaVersion": 1, "distributedInfo": {json.dumps(info)},\n')
            file.write(f'"deviceProperties": [], "traceEvents": [\n{body}\n]}}\n')
        paths.append(path)
    return paths


def _kineto_events(n: int, seed: random.Random) -> Iterator[str]:
    facts = (
        '"Collective name": "allreduce", "In msg nelems": 524288, "Out msg nelems": 524288, '
        '"Group size": 8, "dtype": "BFloat16", "Process Group Name": "0", '
        '"Process Group Description": "default_pg", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"'
    )
    # Whole microseconds, to which HolisticTraceAnalysis rounds.
    host_us, device_us = 1_000, {7: 1_100, 20: 1_100}
    for index in range(n // 3):
        is_reduce = index % 8 == 7
        stream, dur_us = (20, seed.randint(20, 80)) if is_reduce else (7, seed.randint(5, 30))
        name = "aten::linear" if not is_reduce else "nccl:all_reduce"
        kernel = (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            if is_reduce
            else f"sm90_xmma_gemm_bf16bf16_{index % 500}_tn_n_tilesize128x128x64"
        )
        yield (
            f'{{"ph": "X", "cat": "cpu_op", "name": "{name}", "pid": 1, "tid": 1, '
            f'"ts": {host_us:.3f}, "dur": 4.000, "args": {{"External id": {index + 1}}}}}'
        )
        yield (
            '{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, '
            f'"ts": {host_us + 1:.3f}, "dur": 2.000, '
            f'"args": {{"External id": {index + 1}, "correlation": {index + 1}}}}}'
        )
        start_us = max(device_us[stream], host_us + 5)
        yield (
            f'{{"ph": "X", "cat": "kernel", "name": "{kernel}", "pid": 0, "tid": {stream}, '
            f'"ts": {start_us:.3f}, "dur": {dur_us:.3f}, "args": {{"External id": {index + 1}, '
            f'"device": 0, "context": 1, "stream": {stream}, "correlation": {index + 1}'
            f"{', ' + facts if is_reduce else ''}}}}}"
        )
        device_us[stream] = start_us + dur_us
        host_us += 24


def write_chrome(folder: Path, n_events: int) -> list[Path]:
    """The TPU profiler's export of one host of four chips in each file."""
    body = ",\n".join(_chrome_events(n_events // N_FILES, random.Random(4)))
    first = folder / "host0.trace.json"
    head = '{"displayTimeUnit": "ns", "metadata": {"highres-ticks": true}, "traceEvents": [\n'
    first.write_text(f"{head}{body}\n]}}\n", encoding="utf-8")
    return [first, *_copies(first, [folder / f"host{n}.trace.json" for n in range(1, N_FILES)])]


def _chrome_events(n: int, seed: random.Random) -> Iterator[str]:
    shape = "bf16[8,1024,5120]{2,1,0}"
    for chip in range(4):
        yield (
            f'{{"ph": "M", "pid": {chip + 3}, "name": "process_name", '
            f'"args": {{"name": "/device:TPU:{chip}"}}}}'
        )
        yield (
            f'{{"ph": "M", "pid": {chip + 3}, "tid": 3, "name": "thread_name", '
            '"args": {"name": "XLA Ops"}}'
        )
    for chip in range(4):
        at_us = 0.0
        for index in range(n // 4):
            dur_us, op = seed.uniform(0.5, 40), index % 2_000
            opcode = "all-reduce" if index % 16 == 15 else "fusion"
            groups = ", replica_groups=[8,4]<=[32], to_apply=%add" if opcode != "fusion" else ""
            yield (
                f'{{"ph": "X", "pid": {chip + 3}, "tid": 3, "ts": {at_us:.6f}, "dur": {dur_us:.6f}, '
                f'"name": "{opcode}.{op}", "args": {{"hlo_category": "{opcode}", "long_name": '
                f'"%{opcode}.{op} = {shape} {opcode}({shape} %p){groups}", '
                f'"device_duration_ps": "{round(dur_us * 1e6)}", "run_id": "1"}}}}'
            )
            at_us += dur_us


FORMATS: dict[str, tuple[Callable[[Path, int], list[Path]], dict[str, str]]] = {
    "xplane": (write_xplanes, {"topology": TOPOLOGY, "plan": PLAN}),
    "kineto": (write_kineto, {"topology": "h100:8", "plan": "tp=8"}),
    "chrome": (write_chrome, {"topology": TOPOLOGY, "plan": PLAN}),
}


def measured(command: list[str]) -> dict[str, float]:
    """What the command prints as JSON, with wall and CPU time and peak memory of its processes."""
    started, before = time.perf_counter(), _cpu_s()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    peak = [0]
    watch = threading.Thread(target=_watch, args=(child, peak))
    watch.start()
    output, _ = child.communicate()
    watch.join()
    if child.returncode:
        raise SystemExit(f"{command[:2]} ended with exit code {child.returncode}")
    return {
        **json.loads(output.decode().splitlines()[-1]),
        "wall_s": time.perf_counter() - started,
        "cpu_s": _cpu_s() - before,
        "peak_bytes": peak[0],
    }


def _cpu_s() -> float:
    """CPU time of all processes that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _watch(child: "subprocess.Popen[bytes]", peak: list[int]) -> None:
    """Keeps the largest sum of the resident memory of a process and its descendants."""
    while child.poll() is None:
        peak[0] = max(peak[0], sum(map(_resident_bytes, _tree(child.pid))))
        time.sleep(0.1)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [c for t in tasks for c in (t / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from _tree(int(child))


def _resident_bytes(pid: int) -> int:
    """Private and shared memory of a process, without mapped files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def imported(name: str, n_events: int, scratch: Path) -> tuple[dict[str, float], list[Path]]:
    """Writes the files and imports them in a fresh process."""
    write, options = FORMATS[name]
    folder = scratch / f"{name}-{n_events}"
    folder.mkdir()
    paths = write(folder, n_events)
    command = [sys.executable, "-c", IMPORT, json.dumps(options), str(scratch / "run")]
    return measured([*command, *map(str, paths)]), paths


def scale(names: list[str], n_events: int, scratch: Path) -> dict[str, list[dict[str, float]]]:
    """Imports a quarter, a half and all events of each format."""
    results: dict[str, list[dict[str, float]]] = {}
    for name in names:
        results[name] = []
        for share in (4, 2, 1):
            result, paths = imported(name, n_events // share, scratch)
            result["file_bytes"] = sum(path.stat().st_size for path in paths)
            results[name].append(result)
            shutil.rmtree(paths[0].parent)
            n = result["n_events"]
            print(
                f"{name}: {n:,.0f} events, {result['file_bytes'] / 1e6:,.0f} MB in {N_FILES} files: "
                f"{result['wall_s']:.1f} s ({result['cpu_s']:.1f} s of CPU), "
                f"{n / result['wall_s']:,.0f} events/s, "
                f"{result['peak_bytes'] / 1e9:.2f} GB",
                flush=True,
            )
        quarter, whole = results[name][0], results[name][-1]
        print(
            f"{name}: 4 times the events take {whole['cpu_s'] / quarter['cpu_s']:.1f} times the CPU time "
            f"and {whole['peak_bytes'] / quarter['peak_bytes']:.1f} times the memory "
            f"(bounds for all: {MAX_S:.0f} s, {MAX_BYTES / 1e9:.0f} GB)",
            flush=True,
        )
    return results


def against(python: str, n_events: int, scratch: Path) -> dict[str, dict[str, float]]:
    """The same files and the same question for other tools."""
    ours, paths = imported("kineto", n_events, scratch)
    frac = 1 - ours["exposed_s"] / ours["all_s"]
    print(
        f"Kineto, {ours['n_events']:,.0f} events: overlapped share of communication {frac:.4f} in "
        f"{ours['wall_s']:.1f} s ({ours['cpu_s']:.1f} s of CPU)",
        flush=True,
    )
    results = {"kineto": ours}
    for tool, (module, program) in OTHERS.items():
        find = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({module!r}))"
        if subprocess.run([python, "-c", find], check=False).returncode:
            print(f"{tool}: not installed for {python}", flush=True)
            continue
        results[tool] = measured([python, "-c", program, str(paths[0].parent)])
        theirs = results[tool]
        print(
            f"{tool}: {theirs['overlap_frac']:.4f} in {theirs['wall_s']:.1f} s "
            f"({theirs['cpu_s']:.1f} s of CPU): {theirs['wall_s'] / ours['wall_s']:.1f} times as long, "
            f"{theirs['cpu_s'] / ours['cpu_s']:.1f} times the CPU time",
            flush=True,
        )
    return results


def main() -> None:
    """Prints the figures of each format, then those of other tools if a Python with them is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=N_EVENTS)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--against", help="Python of an environment with the other tools")
    parser.add_argument("--against-events", type=int, default=N_AGAINST)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as scratch:
        results: dict[str, object] = dict(
            scale(arguments.formats, arguments.events, Path(scratch)) if arguments.formats else {}
        )
        if arguments.against:
            results["against"] = against(arguments.against, arguments.against_events, Path(scratch))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
