"""Tables of docs/evidence/engines.md, from the programs in tests/published/programs, printed by cog."""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import meshscope
from meshscope.units import format_bytes, format_seconds

PROGRAMS = Path(__file__).parents[1] / "tests" / "published" / "programs"
DEVICE_ORDER = "0,2,4,6,7,5,3,1"  # of vLLM on v6e-8


class Program(NamedTuple):
    """A vendored program, how to import it, and the published time of the whole model's step."""

    label: str
    file: str
    topology: str
    mesh: str
    phase: str
    layers: int
    lengths: str | None
    published_ms: float
    note: str = ""


_LLAMA_8B = "tpu_inference_0.12-llama-8b-v6e_{}-prefill8192-2layers"
_LLAMA_70B = "jax_llm_examples-llama-70b-int8-v5e_4x4-{}-cache2048-8layers"
_R1 = "jax_llm_examples-deepseek-r1-int8-v5e_8x8-decode-batch8-cache2048-61layers"
CHUNK = "8x1024:1024"

ENGINE_STEPS = (
    Program(
        *("vLLM 0.12 prefill, tp=1", _LLAMA_8B.format("1x1-tp1"), "v6e:1x1", "model=1"),
        *("prefill", 32, CHUNK, 221.8),
    ),
    Program(
        *("vLLM 0.12 prefill, tp=2", _LLAMA_8B.format("1x2-tp2"), "v6e:1x2", "model=2"),
        *("prefill", 32, CHUNK, 177.8),
    ),
    Program(
        *("vLLM 0.12 prefill, tp=8", _LLAMA_8B.format("2x4-tp8"), "v6e:2x4", "model=8"),
        *("prefill", 32, CHUNK, 97.7, "some 17 ms of it on the host"),
    ),
    *(
        Program(
            *(f"Llama-3.1-70B int8 decode, tp=16, batch {batch}",),
            *(_LLAMA_70B.format(f"tp16-decode-batch{batch}"), "v5e:4x4", "y=16", "decode"),
            *(80, None, published_ms),
        )
        for batch, published_ms in ((8, 6.29), (32, 9.26), (128, 25.45))
    ),
    Program(
        *("the same, dp=2, tp=8, batch 8", _LLAMA_70B.format("dp2tp8-decode-batch8")),
        *("v5e:4x4", "x=2,y=8", "decode", 80, None, 11.85),
    ),
)


def times() -> None:
    """Prints the modeled step of each program beside the published one."""
    lines: list[str] = []
    for program in ENGINE_STEPS:
        (time,) = _imported(program).record.times
        step, published_s = time.step, program.published_ms / 1e3
        assert step.low_s is not None
        assert step.high_s is not None
        cells = (
            program.label,
            program.topology,
            format_seconds(step.value_s),
            f"{format_seconds(step.low_s)} to {format_seconds(step.high_s)}",
            format_seconds(published_s) + (f" ({program.note})" if program.note else ""),
            f"{step.value_s / published_s - 1:+.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    _table(("program", "slice", "modeled", "range", "published", "error"), lines)


def _imported(program: Program) -> meshscope.Run:
    with tempfile.TemporaryDirectory() as folder:
        return meshscope.import_(
            PROGRAMS / f"{program.file}.hlo.txt.gz",
            topology=program.topology,
            mesh=program.mesh,
            phase=program.phase,
            layers=program.layers,
            step_lengths=program.lengths,
            out=Path(folder) / "run",
        )


def deepseek_r1() -> None:
    """Prints the collectives of DeepSeek-R1's decode step by part and axis."""
    with tempfile.TemporaryDirectory() as folder:
        run = meshscope.import_(
            PROGRAMS / f"{_R1}.hlo.txt.gz",
            topology="v5e:8x8",
            mesh="y=8,z=8",
            out=Path(folder) / "run",
        )
    counts: Counter[tuple[str, ...]] = Counter()
    wire_bytes: Counter[tuple[str, ...]] = Counter()
    for row in run.record.rows:
        assert row.wire_bytes is not None
        layers = "one a layer" if row.layer is not None else "after the layers"
        key = (str(row.part), str(row.kind), str(row.axis), layers)
        counts[key] += row.count
        wire_bytes[key] += int(row.wire_bytes * row.count)
    lines = [
        f"| {part} | {kind} | {axis} | {n} | {layers} | {format_bytes(wire_bytes[key])} |"
        for key, n in counts.items()
        for part, kind, axis, layers in [key]
    ]
    _table(("part", "collective", "axis", "count", "where", "wire, a step"), lines)
    (time,) = run.record.times
    sys.stdout.write(
        f"\n{sum(counts.values())} collectives send {format_bytes(sum(wire_bytes.values()))} a device and "
        f"step; the step takes {format_seconds(time.step.value_s)} (published: 20.8 ms at a context of "
        "512, 23.8 ms at 4096).\n"
    )


def vllm_command() -> str:
    """The command that imports both phases of Llama-3.1-8B on v6e-8."""
    folder = PROGRAMS.relative_to(Path(__file__).parents[1])
    prefill = folder / f"{_LLAMA_8B.format('2x4-tp8')}.hlo.txt.gz"
    decode = folder / "tpu_inference_0.12-llama-8b-v6e_2x4-tp8-decode-1024pages-2layers.hlo.txt.gz"
    return (
        f"meshscope import prefill={prefill} decode={decode} --topology v6e-8 --mesh model=8 "
        f"--device-order {DEVICE_ORDER} --model meta-llama/Llama-3.1-8B "
        "--step-lengths prefill=8x1024:1024,decode=64x1:1088 --out runs/vllm --force"
    )


def own_command() -> str:
    """The command that predicts the textbook's program of the same model, slice and plan."""
    return (
        "meshscope predict meta-llama/Llama-3.1-8B --topology v6e-8 --plan tp=8 --batch 64 "
        "--prompt 1024 --output 128 --out runs/textbook --force"
    )


def _table(titles: tuple[str, ...], lines: list[str]) -> None:
    head = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    sys.stdout.write("\n".join([*head, *lines]) + "\n")
