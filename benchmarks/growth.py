"""How the CPU seconds of commands grow with events, layers, chips, plans and requests: `make growth`.

Each command runs as a process of its own at sizes a decade apart. The exponent p is that of `start + b n^p`, fitted
to the CPU seconds of all its processes, which other work on the machine disturbs less than a clock: 1 is linear, 2
quadratic.
"""

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from read_traces import write_kineto
from synthetic_profile import write_profile

MODEL, EXPERTS = "Qwen/Qwen3-32B", "deepseek-ai/DeepSeek-V3.1-Base"
PLACE = ["--topology", "v6e-8", "--plan", "tp=8"]


class Growth(NamedTuple):
    """A command over sizes of one thing, the smallest first; `command` gets a size and an empty folder."""

    name: str
    of: str
    sizes: Sequence[int]
    command: Callable[[int, Path], list[str]]


def import_xplane(n_events: int, folder: Path) -> list[str]:
    """The import of an XPlane file of four chips."""
    write_profile(folder / "host.xplane.pb", n_events=n_events, backend="tpu")
    place = ["--topology", "v6e:4x8", "--plan", "dp=8,tp=4"]
    return ["import", str(folder / "host.xplane.pb"), *place, "--out", str(folder / "run")]


def import_kineto(n_events: int, folder: Path) -> list[str]:
    """The import of Kineto files of eight ranks."""
    files = map(str, write_kineto(folder, n_events))
    return [
        "import",
        *files,
        "--topology",
        "h100:8",
        "--plan",
        "tp=8",
        "--out",
        str(folder / "run"),
    ]


def import_hlo(n_layers: int, folder: Path) -> list[str]:
    """The import of HLO text whose layers have a product and an all-reduce each."""
    lines = ["HloModule jit_decode, is_scheduled=true, num_partitions=8", ""]
    lines += ["%add (a: f32[], b: f32[]) -> f32[] {", "  %a = f32[] parameter(0)"]
    lines += ["  %b = f32[] parameter(1)", "  ROOT %sum = f32[] add(%a, %b)", "}", ""]
    lines += ["ENTRY %main (s0: f32[8,512]) -> f32[8,512] {", "  %s0 = f32[8,512] parameter(0)"]
    for layer in range(1, n_layers + 1):
        name = f'metadata={{op_name="jit(decode)/decode/layer{layer}/mlp/psum"}}'
        product = f"  %m{layer} = f32[8,512] multiply(%s{layer - 1}, %s{layer - 1})"
        groups = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add"
        root = "ROOT " if layer == n_layers else ""
        reduce = f"  {root}%s{layer} = f32[8,512] all-reduce(%m{layer}), channel_id={layer}"
        lines += [product, f"{reduce}, {groups}, {name}"]
    path = folder / "decode.hlo.txt"
    path.write_text("\n".join([*lines, "}", ""]), encoding="utf-8")
    return ["import", str(path), *PLACE, "--out", str(folder / "run")]


def predict(n_chips: int, _: Path) -> list[str]:
    """The prediction of one plan whose dp fills a slice of v5p."""
    grid = {8: "2x2x2", 64: "4x4x4", 512: "8x8x8", 4096: "16x16x16"}[n_chips]
    plan = ["--topology", f"v5p:{grid}", "--plan", "dp=-1,tp=8", "--batch", str(n_chips)]
    return ["predict", MODEL, *plan]


def plan(n_chips: int, _: Path) -> list[str]:
    """The search of the plans of a slice."""
    grid = {32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}[n_chips]
    return ["plan", EXPERTS, "--topology", f"v6e:{grid}", "--json"]


def serve(n_requests: int, _: Path) -> list[str]:
    """A server that is below its capacity."""
    return ["serve-sim", MODEL, *PLACE, "--rate", "2", "--requests", str(n_requests)]


def serve_full(n_requests: int, _: Path) -> list[str]:
    """A server whose cache is full, so that it preempts."""
    full = ["--rate", "40", "--output", "1024", "--max-sequences", "1024"]
    return ["serve-sim", MODEL, *PLACE, *full, "--requests", str(n_requests)]


GROWTHS = (
    Growth("import, XPlane", "events", (1_000, 10_000, 100_000, 1_000_000), import_xplane),
    Growth("import, Kineto", "events", (2_400, 24_000, 240_000, 2_400_000), import_kineto),
    Growth("import, HLO", "layers", (3, 30, 300, 3_000), import_hlo),
    Growth("predict", "chips", (8, 64, 512, 4_096), predict),
    Growth("plan", "chips", (32, 64, 128, 256), plan),
    Growth("serve-sim", "requests", (100, 1_000, 10_000, 100_000), serve),
    Growth("serve-sim, full cache", "requests", (100, 1_000, 10_000, 100_000), serve_full),
)


def cpu_s(arguments: Sequence[str]) -> float:
    """CPU seconds of a command and its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "meshscope", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(growth: Growth) -> Iterator[float]:
    """CPU seconds at each size."""
    for size in growth.sizes:
        with TemporaryDirectory() as folder:
            yield cpu_s(growth.command(size, Path(folder)))


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float | None:
    """The p of `start + b n^p` with the least relative error over all sizes; None if the time hardly grows."""
    if max(seconds) < 1.1 * min(seconds):
        return None
    relative = np.array(sizes, dtype=float) / sizes[-1]
    weights, errors = 1 / np.array(seconds), dict[float, float]()
    for power in np.arange(0.05, 3.0, 0.01):
        terms = np.stack([np.ones_like(relative), relative**power], axis=1) * weights[:, None]
        coefficients, *_ = np.linalg.lstsq(terms, np.ones(len(sizes)))
        if min(coefficients) >= 0:
            errors[float(power)] = float(((terms @ coefficients - 1) ** 2).sum())
    return min(errors, key=errors.__getitem__, default=None)


def main(names: Sequence[str]) -> None:
    """Prints a row for each command, or for those whose names begin so."""
    print("| command | over | sizes | CPU seconds | exponent |\n|---|---|---|---|---|")
    for growth in GROWTHS:
        if names and not growth.name.startswith(tuple(names)):
            continue
        seconds = list(measured(growth))
        power = exponent(growth.sizes, seconds)
        sizes = ", ".join(f"{size:,}" for size in growth.sizes)
        times = ", ".join(f"{one:.2f}" for one in seconds)
        row = (growth.name, growth.of, sizes, times, "flat" if power is None else f"{power:.2f}")
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
