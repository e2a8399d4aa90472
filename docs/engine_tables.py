"""Tables of docs/evidence/engines.md from the stored steps of engines, printed by cog."""

import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "golden" / "engines"))

from engine_steps import CASES, replayed

import meshscope
from meshscope.events.enums import Kind, Part, Phase, Source
from meshscope.events.step_time import StepTime, TimeEstimate
from meshscope.units import format_bytes, format_seconds

RELEASES = ("0.12.0", "0.24.0", "0.32.0")
MODELS = {"llama": "Llama-3.1-8B", "qwen": "Qwen3-32B"}
SGLANG_MAIN = "SGLang-JAX main"
_PHASES = (Phase.PREFILL, Phase.DECODE)
_EXPERTS = "moe."


class Served(NamedTuple):
    """A published step of Qwen3-8B; `suffix` names the slice in the names of stored programs."""

    label: str
    suffix: str
    phase: Phase
    n_chunks: int
    host_s: float
    published_s: float


@cache
def _run(name: str) -> meshscope.Run:
    with tempfile.TemporaryDirectory() as folder:
        return replayed(name, Path(folder) / "run")


def releases() -> None:
    """Prints the decode step of two models in three releases."""
    lines = [
        _line(MODELS[model], release, *_step_cells(f"{model}-{release}", Phase.DECODE))
        for model in MODELS
        for release in RELEASES
    ]
    _table(("model", "tpu-inference", *_STEP), lines)


def sglang_releases() -> None:
    """Prints the decode step of Qwen3-32B in the released SGLang-JAX and in its repository."""
    lines = [
        _line(release, *_step_cells(f"qwen-sglang-{release}", Phase.DECODE))
        for release in ("0.0.2", "main")
    ]
    _table(("SGLang-JAX", *_STEP), lines)


def against_own(model: str, release: str = "0.32.0") -> None:
    """Prints both phases of a model by part: the engine's, and meshscope's own compiled program."""
    cases = {
        f"vLLM {release}": f"{model}-{release}",
        SGLANG_MAIN: f"{model}-sglang-main",
        "own": f"{model}-own",
    }
    names = {label: name for label, name in cases.items() if name in CASES}
    lines = [
        _line(phase, label, *_step_cells(name, phase))
        for phase in _PHASES
        for label, name in names.items()
    ]
    _table(("phase", "program", *_STEP), lines)


def collectives(name: str, phase: str) -> None:
    """Prints the collectives of one step by kind, part and array."""
    counts: dict[tuple[str, ...], int] = {}
    wire: dict[tuple[str, ...], float] = {}
    for row in _rows(_run(name), Phase(phase)):
        shape = "unknown" if row.shape is None else f"{row.dtype}[{','.join(map(str, row.shape))}]"
        key = (str(row.kind), shape, str(row.part))
        counts[key] = counts.get(key, 0) + row.count
        wire[key] = wire.get(key, 0.0) + (row.wire_bytes or 0.0) * row.count
    lines = [_line(*key, n, format_bytes(wire[key])) for key, n in counts.items()]
    _table(("collective", "array", "part", "count", "sent by a device"), lines)


def beside(names: dict[str, str]) -> None:
    """Prints both phases of stored steps, whose labels are the keys."""
    lines = [
        _line(phase, label, *_step_cells(name, phase))
        for phase in _PHASES
        for label, name in names.items()
    ]
    _table(("phase", "program", *_STEP), lines)


def sequence_parallel() -> None:
    """Prints prefill of Qwen3-32B with and without split tokens."""
    lines = [
        _line(
            release, label, *_kinds(f"qwen-{release}{suffix}"), *_times(f"qwen-{release}{suffix}")
        )
        for release in RELEASES[-1:]
        for label, suffix in (("off", ""), ("on", "-sp"))
    ]
    titles = (
        "tpu-inference",
        "sp",
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "sent by a device",
    )
    _table((*titles, "prefill", "exposed communication"), lines)


def quantized() -> None:
    """Prints the decode step of Qwen3-32B with weights of several dtypes."""
    names = {"bf16": "", "fp8 per channel, fp8 cache": "-fp8"}
    lines = [
        _line(label, *_step_cells(f"qwen-0.32.0{suffix}", Phase.DECODE))
        for label, suffix in names.items()
    ]
    _table(("weights", *_STEP), lines)


def served() -> None:
    """Prints steps of Qwen3-8B beside those of sglang-jax, with the host's time on one chip."""
    lines = [_served_line(step, engine) for step in SERVED for engine in _SERVERS]
    _table(("step", "program", "device, modeled", "range", "host", "published", "error"), lines)


def served_errors(engine: str) -> list[float]:
    """Modeled over published time, less 1, of the steps of an engine."""
    return [_served_error(step, _served_step(step, engine).value_s) for step in SERVED]


def _served_error(served: Served, value_s: float) -> float:
    return (value_s + served.host_s) / served.published_s - 1


def _served_step(served: Served, engine: str) -> TimeEstimate:
    """The time of a decode step, or of a chunk of prefill."""
    step = _time(_run(f"{_SERVERS[engine]}{served.suffix}"), served.phase).step
    return step * (1 / served.n_chunks)


def _served_line(served: Served, engine: str) -> str:
    step = _served_step(served, engine)
    assert step.low_s is not None
    assert step.high_s is not None
    return _line(
        served.label,
        engine,
        format_seconds(step.value_s),
        f"{format_seconds(step.low_s)} to {format_seconds(step.high_s)}",
        format_seconds(served.host_s) if served.host_s else "overlaps",
        format_seconds(served.published_s),
        f"{_served_error(served, step.value_s):+.0%}",
    )


# Published: pathfinder-pf/sglang-jax-ci-data@444cfdd and @f258261, perf/2026-01-13, prompts of 1,024 tokens.
# Throughput of prefill gives 2,048 tokens a chunk; decode is the median ITL. Host: docs/evidence/times.md.
SERVED = (
    Served("prefill of 2,048 tokens, v6e-1", "", Phase.PREFILL, 4, 0.0, 2048 / 31243.6),
    Served("decode of 8, v6e-1", "", Phase.DECODE, 1, 4e-3, 15.194e-3),
    Served("prefill of 2,048 tokens, v6e-4", "-tp4", Phase.PREFILL, 16, 0.0, 2048 / 72770.3),
)
_SERVERS = {SGLANG_MAIN: "qwen3-8b-sglang-main", "vLLM 0.32.0": "qwen3-8b-0.32.0"}


_STEP = (
    "collectives",
    "sent by a device",
    "step",
    "attention",
    "MLP or experts",
    "head and sampler",
)


def _step_cells(name: str, phase: Phase) -> tuple[str, ...]:
    run = _run(name)
    rows, time = _rows(run, phase), _time(run, phase)
    wire = sum((row.wire_bytes or 0.0) * row.count for row in rows)
    low, high = time.step.low_s, time.step.high_s
    assert low is not None
    assert high is not None
    return (
        str(sum(row.count for row in rows)),
        format_bytes(wire),
        f"{format_seconds(time.step.value_s)} ({format_seconds(low)} to {format_seconds(high)})",
        _busy(time, (Part.ATTN,)),
        _busy(time, (Part.MLP, *(part for part in Part if part.value.startswith(_EXPERTS)))),
        _busy(time, (Part.LM_HEAD, Part.SAMPLE)),
    )


def _busy(time: StepTime, parts: Iterable[str]) -> str:
    """The computation and the exposed communication of these parts."""
    known = set(map(str, parts))
    return format_seconds(sum(p.compute_s + p.exposed_s for p in time.parts if p.part in known))


def _kinds(name: str) -> tuple[str, ...]:
    rows = [row for row in _rows(_run(name), Phase.PREFILL) if row.part is not Part.SAMPLE]
    kinds = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    counts = (str(sum(row.count for row in rows if row.kind is kind)) for kind in kinds)
    wire = sum((row.wire_bytes or 0.0) * row.count for row in rows)
    return (*counts, format_bytes(wire))


def _times(name: str) -> tuple[str, str]:
    time = _time(_run(name), Phase.PREFILL)
    return format_seconds(time.step.value_s), format_seconds(time.exposed_s)


def _rows(run: meshscope.Run, phase: Phase) -> list[meshscope.events.collective.Collective]:
    return [r for r in run.record.rows if r.phase is phase and r.source is Source.COMPILED]


def _time(run: meshscope.Run, phase: Phase) -> StepTime:
    (time,) = (t for t in run.record.times if t.phase is phase and t.source is Source.COMPILED)
    return time


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _table(titles: tuple[str, ...], lines: list[str]) -> None:
    sys.stdout.write("\n".join([_line(*titles), f"|{' --- |' * len(titles)}", *lines]) + "\n")
