"""A digest of what a change of structure must not change: predictions, readings, the JSON of every command, and data.

`python tools/evidence.py compare` makes it again and prints each line that differs from `tests/evidence/`;
`write` replaces the stored lines. Names of parts after it (predictions, readings, commands, data) choose some, and
`every=8` compares each eighth prediction, in an eighth of the time. It uses the public API and the command line alone, so that it outlives
any layout of the packages. A line has the key figures and a hash of everything else.
"""

import difflib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import product
from math import floor, isfinite, log10, prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import meshscope

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests" / "evidence"
TESTS = ROOT / "tests"
GOLDEN = TESTS / "golden"
DIGITS = 6  # that a figure keeps: sums in another order differ in the last ones

# One model of each mechanism and family.
MODELS = (
    *("Qwen/Qwen3-32B", "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B"),
    *("mistralai/Mistral-7B-v0.1", "microsoft/phi-4", "google/gemma-2-9b-it"),
    *("google/gemma-3-27b-it", "google/gemma-4-31B-it", "google/gemma-4-E4B-it"),
    *("google/gemma-4-26B-A4B-it", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"),
    *("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B"),
    *("meta-llama/Llama-4-Scout-17B-16E-Instruct", "zai-org/GLM-4.5-Air", "openai/gpt-oss-120b"),
    *("deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.2"),
    *("zai-org/GLM-5.2", "deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4.1-Flash"),
)
PLANS = (
    *("tp=8", "tp=8,sp", "dp=2,tp=4", "fsdp=8", "fsdp=2,tp=4,sp", "pp=2,tp=4", "pp=4,dp=2"),
    *("cp=2,tp=4", "cp=4,dp=2", "dp=8,ep=8", "dp=2,tp=4,ep=8", "tp=8,ep=8", "pp=2,dp=2,tp=2,ep=4"),
)
SLICES = ("v4-16", "v5e-8", "v5p-16", "v6e-8", "tpu7x-8", "2xv6e:2x2", "h100:8")
WORKLOADS: tuple[Mapping[str, Any], ...] = (
    {"batch": 8, "prompt": 1024},
    {"batch": 64, "prompt": 4096, "output": 512, "weight_dtype": "int8"},
    {"batch": 16, "prompt": 8192, "prefill_chunk": 2048},
    {"batch": 8, "prompt": 500, "output": 33, "dtype": "bf16", "cache_dtype": "fp8"},
)
COMMANDS = (
    "predict Qwen/Qwen3-32B --topology v6e-8 --plan tp=8 --batch 8 --prompt 1024",
    "predict deepseek-ai/DeepSeek-V3.1 --topology tpu7x-16 --plan dp=16,ep=16 --batch 64",
    "predict openai/gpt-oss-120b --topology v6e-8 --plan tp=8,ep=8 --engine meshscope --batch 32",
    "predict meta-llama/Llama-3.2-3B --topology 2xh100:4 --plan tp=4,pp=2 --engine vllm",
    "predict Qwen/Qwen3-8B --topology v6e-4 --plan tp=4 --speculate eagle:k=3,acceptance=0.7",
    "predict Qwen/Qwen3-8B --topology v6e-4 --plan tp=4 --frontend torchxla",
    "predict Qwen/Qwen3-30B-A3B --topology v6e-8 --plan dp=8,ep=8 --partitioner auto --batch 8",
    "plan Qwen/Qwen3-32B --topology v6e-8 --batch 64",
    "plan Qwen/Qwen3-8B --topology v6e-8,v5e-8 --prices v6e=2.7,v5e=1.2 --slo ttft=2,tpot=0.05",
    "plan meta-llama/Llama-3.3-70B-Instruct --fit --topology v6e",
    "serve-sim Qwen/Qwen3-32B --topology v6e-8 --plan tp=8 --rate 2 --requests 200",
    "models qwen",
    "topologies",
    "predict Qwen/Qwen3-8B --topology v6e-8 --plan dp=2,tp=4 --batch 8 --out OTHER",
    "import tests/golden/traces/vllm-tp2 --topology h100:2 --plan tp=2 --model Qwen/Qwen3-8B --out IMPORTED",
    "show tests/golden/run",
    "show tests/golden/run OTHER",
    "show IMPORTED",
    "compare tests/golden/run OTHER",
    "compare tests/golden/run",
    "export tests/golden/run --to chrome --out CHROME",
    "sql tests/golden/run 'select phase, part, sum(count) n, sum(wire_bytes) b from collectives group by all order by all'",
)  # fmt: skip
VOLATILE = {
    "versions",
    "command",
    "created",
    "seconds",
    "run",
    "path",
    "hash",
    "host",
    "source_line",
}


def main(arguments: list[str]) -> int:
    """0 if the digest is the stored one, or was written; 1 if lines differ."""
    action, *parts = arguments or [""]
    every = int(parts.pop().removeprefix("every=")) if parts and parts[-1][:6] == "every=" else 1
    if (action, every == 1) not in CALLS or not PARTS.keys() >= set(parts):
        print(f"usage: evidence.py compare|write [{'|'.join(PARTS)}] [every=N]", file=sys.stderr)
        return 2
    made = {name: list(lines(every)) for name, lines in PARTS.items() if not parts or name in parts}
    if action == "write":
        STORED.mkdir(exist_ok=True)
        for name, lines in made.items():
            (STORED / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
        return 0
    differing = [line for name, lines in made.items() for line in differences(name, lines, every)]
    print("\n".join(differing) or f"{sum(map(len, made.values())):,} lines, all equal")
    return 1 if differing else 0


def differences(name: str, lines: list[str], every: int) -> Iterator[str]:
    """The lines of a part that are not as they are stored, as a diff without context."""
    stored = (STORED / f"{name}.txt").read_text().splitlines()
    stored = stored[::every] if name == "predictions" else stored
    for line in difflib.unified_diff(stored, lines, name, name, n=0, lineterm=""):
        if not line.startswith("@@"):
            yield line


def digest(value: Any) -> str:
    """A hash of plain values, whose floats count with DIGITS digits."""
    text = json.dumps(plain(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def plain(value: Any) -> Any:
    """The value without what differs from run to run."""
    if isinstance(value, float):
        return rounded(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if k not in VOLATILE}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\S*(/tmp|/runs)\S*", "PATH", value.replace(f"{ROOT}/", ""))


def rounded(x: float) -> float:
    """The number with DIGITS digits."""
    if x == 0 or not isfinite(x):
        return x
    return round(x, DIGITS - 1 - floor(log10(abs(x))))


def figure(x: float | None) -> str:
    """A figure to be read, with four digits."""
    return "-" if x is None else f"{x:.4g}"


def _pool() -> ProcessPoolExecutor:
    """A process for each core; polars does not survive a fork."""
    return ProcessPoolExecutor(os.cpu_count(), get_context("spawn"))


class Case(NamedTuple):
    """One prediction."""

    model: str
    topology: str
    plan: str
    options: Mapping[str, Any]


def predictions(every: int) -> Iterator[str]:
    """A line for each model, plan and slice; the workloads take turns."""
    cases = [
        Case(model, topology, plan, WORKLOADS[number % len(WORKLOADS)])
        for number, (model, plan, topology) in enumerate(product(MODELS, PLANS, SLICES))
    ]
    with _pool() as pool:
        yield from pool.map(_prediction, cases[::every], chunksize=16)


def _prediction(case: Case) -> str:
    options = ",".join(f"{name}={value}" for name, value in case.options.items())
    words = f"{case.model} {case.topology} {case.plan} {options}"
    try:
        run = meshscope.predict(
            case.model, topology=case.topology, plan=case.plan, **dict(case.options)
        )
    except meshscope.MeshscopeError as error:
        return f"{words}: {error}"
    time, memory = run.time, run.memory
    rows = run.collectives.select(*ROW_COLUMNS).to_dicts()
    hbm = figure(memory.total_bytes or memory.weights_bytes + memory.kv_cache_bytes)
    figures = f"{figure(time.ttft_s)} s {figure(time.tpot_s)} s {hbm} B {len(rows)} rows"
    others = {name: getattr(memory, name) for name in MEMORY}
    return f"{words}: {figures} {digest([time.ttft_s, time.tpot_s, time.e2e_s, others, rows])}"


ROW_COLUMNS = (
    *("phase", "layer", "part", "kind", "axis", "group_size", "groups", "dtype", "shape"),
    *("payload_bytes", "wire_bytes", "stage", "count", "n_steps", "dur_s", "exposed_s"),
)
MEMORY = (
    *("weights_bytes", "kv_cache_bytes", "temp_bytes", "total_bytes", "hbm_bytes", "fits"),
    *("temp_low_bytes", "temp_high_bytes", "padding_bytes"),
)


def readings(_: int) -> Iterator[str]:
    """A line for each golden program, published program, engine step and trace, as they are read."""
    goldens = _module("golden/hlo/goldens").GOLDENS
    for path in sorted((GOLDEN / "hlo").glob("*.txt.gz")):
        golden = goldens[path.name.split(".jax-")[0]]
        slices = f"{golden.n_slices}x" if golden.n_slices > 1 else ""
        mesh = ",".join(f"{axis}={size}" for axis, size in golden.axes)
        yield _reading(path, topology=slices + golden.topology, mesh=mesh, phase=golden.phase)
    for path in sorted((TESTS / "published" / "programs").glob("*.hlo.txt.gz")):
        chip, grid = re.findall(r"-(v[0-9]+[ep]?)_([0-9x]+)-", path.name)[0]
        n_devices = prod(map(int, grid.split("x")))
        yield _reading(path, topology=f"{chip}:{grid}", mesh=f"x={n_devices}", phase=_phase(path))
    yield _reading(GOLDEN / "traces" / "vllm-tp2", topology="h100:2", plan="tp=2")
    yield _reading(GOLDEN / "traces" / "vllm-tp2")
    steps = _module("golden/engines/engine_steps")
    with _pool() as pool:
        yield from pool.map(_engine_step, steps.CASES)


def _module(path: str) -> Any:
    """A module of the tests, by its path."""
    sys.path.insert(0, str((TESTS / path).parent))
    return import_module(Path(path).name)


def _phase(path: Path) -> str:
    return "prefill" if "prefill" in path.name else "decode"


def _reading(path: Path, **options: Any) -> str:
    words = " ".join([str(path.relative_to(TESTS)), *(f"{k}={v}" for k, v in options.items())])
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = meshscope.import_(path, **options, out=Path(folder) / "run")
        except meshscope.MeshscopeError as error:
            return f"{words}: {error}"
        return f"{words}: {_summary(run)}"


def _engine_step(name: str) -> str:
    steps = _module("golden/engines/engine_steps")
    with tempfile.TemporaryDirectory() as folder:
        return f"engines {name}: {_summary(steps.replayed(name, Path(folder) / 'run'))}"


def _summary(run: meshscope.Run) -> str:
    document = run.as_dict()
    totals = {phase: total["count"] for phase, total in document["totals"].items()}
    times = [document["time"][name] for name in ("prefill_s", "decode_step_s", "step_s")]
    summary = f"{totals} collectives, {', '.join(map(figure, times))} s {digest(document)}"
    outside = fractions_outside(run, document)
    return f"{summary} {OUTSIDE} {outside}" if outside else summary


OUTSIDE = "fractions outside 0 to 1:"
ROUNDING = 1e-9
# Fractions that may lie outside, each with its reason.
MAY_LIE_OUTSIDE = {
    "tokens_per_s_frac": "a change of throughput by a suggestion, +0.14 is 14 % more",
    "hbm_frac": "a step that does not fit needs more than the HBM has",
}


def fractions_outside(
    run: meshscope.Run, document: Mapping[str, Any] | None = None
) -> list[tuple[str, float]]:
    """Fractions that are none, in the JSON document and all metrics of a run; a program without times has none."""
    every = [
        *_fractions(document or run.as_dict()),
        *_fractions({name: table.to_dicts() for name, table in run.metrics.items()}, "metrics"),
    ]
    return [
        (place, value)
        for place, value in every
        if not -ROUNDING <= value <= 1 + ROUNDING
        and place.rpartition(".")[2] not in MAY_LIE_OUTSIDE
    ]


def _fractions(value: Any, at: str = "") -> Iterator[tuple[str, float]]:
    """Every number under a key that ends in _frac, with its place."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            if str(key).endswith("_frac") and isinstance(one, int | float):
                yield f"{at}.{key}", float(one)
            yield from _fractions(one, f"{at}.{key}")
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _fractions(one, at)


def commands(_: int) -> Iterator[str]:
    """A line for each value of each command's JSON that is not a list of rows."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        shutil.copytree(TESTS, at / "tests", ignore=shutil.ignore_patterns("*.py"))
        for command in COMMANDS:
            yield from _command(command, at)


def _command(command: str, folder: Path) -> Iterator[str]:
    words = [sys.executable, "-m", "meshscope", *shlex.split(command), "--json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"{command}: {done.stderr.strip()}"
        return
    document = json.loads(done.stdout.splitlines()[-1])
    for key, value in document.items() if isinstance(document, dict) else [("", document)]:
        yield f"{command}: {key} {digest(value)}"


# Tables of constants, of which no prediction has all: published, fitted, or seen in compiled programs.
CONSTANTS = (
    *("src/meshscope/hardware/*.json", "src/meshscope/serving/*.toml", "src/meshscope/dtypes.toml"),
    *("src/meshscope/model/catalog.json", "src/meshscope/model/formats.toml", "tests/**/*.csv"),
)
PROSE = {"about", "source", "sources"}  # keys that change no figure


def data(_: int) -> Iterator[str]:
    """A line for each figure and stored table of the evidence pages, and for each table of constants."""
    constants = (path for pattern in CONSTANTS for path in sorted(ROOT.glob(pattern)))
    for path in [*sorted((ROOT / "docs" / "evidence").rglob("*.*")), *constants]:
        if path.suffix not in {".md", ".yaml", ".pyc"} and path.name != "page.js":
            content = hashlib.sha256(_values(path)).hexdigest()
            yield f"{path.relative_to(ROOT).as_posix()} {content[:16]}"


def _values(path: Path) -> bytes:
    """The content of a file, without comments and sources if it is a table of constants."""
    read = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix)
    if read is None or path.is_relative_to(ROOT / "docs"):
        return path.read_bytes()
    return json.dumps(_without_prose(read(path.read_text())), sort_keys=True).encode()


def _without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_prose(v) for key, v in value.items() if key not in PROSE}
    return [_without_prose(v) for v in value] if isinstance(value, list) else value


CALLS = {("compare", True), ("compare", False), ("write", True)}
PARTS: Mapping[str, Callable[[int], Iterable[str]]] = {
    "predictions": predictions,
    "readings": readings,
    "commands": commands,
    "data": data,
}

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
