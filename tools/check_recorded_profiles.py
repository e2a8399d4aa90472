"""Checks the readers against public recordings of other projects.

`python tools/check_recorded_profiles.py FOLDER` looks for these files anywhere under FOLDER and prints
a line for each; it exits with 1 if a figure differs. Download them from

- openxla/xprof@01d85deb6a7a: xprof/convert/test_xplanes/tpu_inference_2.xplane.pb
- AMD-AGI/TraceLens@171dd74721ca: mi300_jax_conv.xplane.pb
- AI-Hypercomputer/maxtext@e591f30cbbf2: tests/utils/llama3_8b_train_step.hlo.txt
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl

from meshscope.events.enums import Kind
from meshscope.plans.mesh import Mesh
from meshscope.readers.hlo.collectives import module_collectives
from meshscope.readers.hlo.parse import read_hlo
from meshscope.readers.profile.ops import ops_of
from meshscope.readers.profile.xplane import read_xspace

LINES = ("XLA Modules", "XLA Ops", "Async XLA Ops", "Overlay", "XLA TraceMe")
GROUPS = [[0, 4], [1, 5], [2, 6], [3, 7]]
REDUCE = ("all_reduce", "f32", [5, 1024, 1024, 256], 5_368_709_120, GROUPS, "leaf")
COLUMNS = ("kind", "dtype", "shape", "payload_bytes", "groups", "role")
GATHERED = [
    (1, 32, 128, 4096),
    (1, 4096, 32, 128),
    (1, 4096, 8, 128),
    (1, 4096, 8, 128),
    (1, 14336, 4096),
    (1, 4096, 14336),
    (1, 4096, 14336),
]

Findings = Mapping[str, bool]


def check_tpu(path: Path) -> Findings:
    """4 chips of a v6e-8, three all-reduces per chip of 121.69 to 121.72 ms."""
    space = read_xspace(path)
    chips = [plane for plane in space.planes if plane.name.startswith("/device:TPU:")]
    ops = ops_of(space).wide()
    reduces = ops.filter(pl.col("kind").is_not_null())
    durations_ms = [round(value * 1e3, 2) for value in reduces["dur_s"].sort()]
    return {
        "chips": [plane.name for plane in chips] == [f"/device:TPU:{n}" for n in range(4)],
        "type": {plane.stats["device_type_string"] for plane in chips} == {"TPU v6 Lite"},
        "lines": all(plane.lines == LINES for plane in chips),
        "count": reduces.group_by("device").len()["len"].to_list() == [3] * 4,
        "size": reduces.select(COLUMNS).unique().rows() == [REDUCE],
        "time": (durations_ms[0], durations_ms[-1]) == (121.69, 121.72),
    }


def check_gpu(path: Path) -> Findings:
    """235 kernels and no collectives."""
    space = read_xspace(path)
    ops = ops_of(space).wide()
    planes = [plane for plane in space.planes if plane.name.startswith("/device:GPU")]
    return {
        "kernels": ops.height == sum(len(plane.events) for plane in planes) == 235,
        "collectives": ops["kind"].is_not_null().sum() == 0,
    }


def check_maxtext(path: Path) -> Findings:
    """The first 2,000 lines gather seven weights over fsdp."""
    module, mesh = read_hlo(path, is_partial=True), Mesh(axes=(("fsdp", 4),))
    rows = module_collectives(module, mesh=mesh).rows()
    end = "the text is cut off at line 2000"
    return {
        "kinds": all((row.kind, row.axis) == (Kind.ALL_GATHER, "fsdp") for row in rows),
        "shapes": [row.shape for row in rows] == GATHERED,
        "end": all(end in str(row.axis_reason) for row in rows),
    }


CHECKS: Mapping[str, Callable[[Path], Findings]] = {
    "tpu_inference_2.xplane.pb": check_tpu,
    "mi300_jax_conv.xplane.pb": check_gpu,
    "llama3_8b_train_step.hlo.txt": check_maxtext,
}


def verdict(folder: Path, name: str) -> str:
    """`ok`, `missing`, or the figures that differ."""
    path = next(folder.rglob(name), None)
    if path is None:
        return "missing"
    wrong = [figure for figure, agrees in CHECKS[name](path).items() if not agrees]
    return f"differs: {', '.join(wrong)}" if wrong else "ok"


def main(folder: Path) -> int:
    """Prints one line per file; 1 if a figure differs."""
    verdicts = {name: verdict(folder, name) for name in CHECKS}
    for name, result in verdicts.items():
        print(f"{name}: {result}")
    return int(any(result.startswith("differs") for result in verdicts.values()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Give one folder: python tools/check_recorded_profiles.py FOLDER")
    sys.exit(main(Path(sys.argv[1])))
