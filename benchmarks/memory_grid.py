"""Memory of compiled programs over families, plans, chips and workloads: what the formulas are judged by.

    python benchmarks/memory_grid.py CACHE

compiles the programs that are missing in the folder CACHE and rewrites memory_grid.csv, which holds the
compiler's memory analysis of each program. It can be interrupted and resumed. Without CACHE, prints the
table of docs/evidence/memory.md.
"""

import csv
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from meshscope.api.options import request_of
from meshscope.api.request import ExperimentRequest
from meshscope.cost.memory import TempEstimate, temp_estimate
from meshscope.plans.experiment import Experiment

CSV = Path(__file__).with_suffix(".csv")
COLUMNS = ("case", "phase", "chunk", "argument_bytes", "output_bytes", "alias_bytes", "temp_bytes")


@dataclass(frozen=True, kw_only=True)
class GridCase:
    """An experiment of the grid as one line: model, slice, plan and other options."""

    line: str

    @property
    def experiment(self) -> Experiment:
        """The experiment; `w`, `c`, `b`, `p` and `o` are weight and cache dtype, batch, prompt and output."""
        model, topology, plan, *options = self.line.split()
        short = {
            "w": "weight_dtype",
            "c": "cache_dtype",
            "b": "batch",
            "p": "prompt",
            "o": "output",
        }
        pairs = dict(option.split(":") for option in options)
        values = {
            short.get(name, name): int(value) if value.isdigit() else value
            for name, value in pairs.items()
        }
        values |= {"model": model, "topology": topology, "plan": plan, "dtype": "bf16"}
        return request_of(ExperimentRequest, values).experiment()

    @property
    def file_name(self) -> str:
        """The name of its file in the cache."""
        return self.line.replace(" ", "_") + ".json"


N_FITTED = 22  # cases from the first on with which the rules of the estimate were made
LINES = """
Llama-3.1-8B v6e:1x1 tp=1 b:1 p:1024
Llama-3.1-8B v6e-8 tp=8 b:8 p:1024
Llama-3.1-8B v6e-8 tp=8 b:64 p:1024
DeepSeek-V2-Lite v6e-8 dp=2,tp=4,ep=8 b:8 p:1024
Llama-3.1-8B v6e-8 tp=8 b:1 p:32768
Llama-3.1-8B v6e-8 tp=8 b:8 p:1024 loop:unroll layers:4
Mixtral-8x7B-v0.1 v6e-8 dp=8,ep=8 b:16 p:1024
Llama-3.1-8B v6e-8 fsdp=8 b:8 p:1024
DeepSeek-V2-Lite v6e-8 tp=8 b:32 p:1024
Qwen3-30B-A3B v6e-8 tp=8,ep=8 b:16 p:1024
Llama-3.1-8B v6e-8 tp=8 b:64 p:1024 prefill_chunk:off
Llama-3.1-8B v6e-8 tp=8 b:8 p:1024 w:s8
Qwen3-32B v6e-8 tp=8 b:8 p:1024
Qwen3-32B v6e-8 tp=8,sp b:8 p:1024
Qwen2.5-7B tpu7x:1x1x1 dp=2 b:16 p:1024 loop:unroll layers:8
Llama-3.3-70B v6e-8 tp=8 b:64 p:1024
Llama-3.1-8B v6e-8 pp=2,tp=4 b:8 p:1024
Qwen3.5-9B v6e-8 tp=8 b:8 p:1024 layers:8
Qwen3.5-9B v6e-8 tp=8 b:64 p:1024 layers:8
Qwen3.5-9B v6e:1x1 tp=1 b:4 p:1024 layers:8
Qwen3.5-9B v6e-8 tp=8 b:8 p:1024
Qwen3.5-9B v6e-8 pp=2,tp=4 b:8 p:1024
Qwen3.5-35B-A3B v6e-8 dp=2,tp=4,ep=8 b:8 p:1024 layers:8
Qwen3-Next-80B-A3B-Instruct v6e-8 tp=8 b:32 p:1024 layers:12
Qwen3.5-9B v6e-8 fsdp=8 b:8 p:1024 layers:8
Qwen3.5-35B-A3B v5e-8 tp=8,ep=8 b:16 p:1024
Qwen3-30B-A3B v6e-8 dp=2,tp=4,ep=8 b:8 p:1024
Llama-3.1-8B v6e-8 cp=2,tp=4 b:4 p:8192
Mixtral-8x7B-v0.1 v6e-8 tp=8 b:16 p:1024
gpt-oss-120b v6e-8 tp=8,ep=8 b:64 p:1024
Llama-3.1-8B v6e-8 tp=8,sp b:8 p:1024
Qwen3-32B v6e-8 tp=8 b:256 p:1024
DeepSeek-V3.1-Base v6e:8x8 dp=8,tp=8,ep=64 b:64 p:1024
Llama-3.1-8B v5e-4 tp=4 b:16 p:1024
Qwen3-32B v6e-8 dp=2,tp=4 b:32 p:2048
Llama-3.1-8B v6e-8 tp=8 b:8 p:1024 kernels:off
Llama-3.2-3B v5e:1x1 tp=1 b:4 p:512
Llama-3.1-8B v6e-8 tp=8 b:64 p:1024 w:f8e4m3fn c:f8e4m3fn
DeepSeek-V2-Lite v6e-8 dp=8,ep=8 b:64 p:1024
Qwen3-32B v5p:2x2x1 tp=4 b:64 p:4096
Llama-3.1-8B v6e-8 cp=8 b:1 p:32768
Llama-3.3-70B tpu7x-8 tp=8 b:128 p:1024
Qwen2.5-32B v5e-16 tp=8,dp=2 b:32 p:1024
Llama-2-13B v4-8 tp=4 b:16 p:1024
Qwen3-30B-A3B v5e-16 dp=2,tp=8,ep=16 b:32 p:2048
gpt-oss-120b v5p:2x2x2 dp=2,tp=4,ep=8 b:8 p:1024
Mixtral-8x7B-v0.1 v5p:2x2x2 dp=2,tp=4,ep=8 b:64 p:2048
DeepSeek-V3.1-Base v6e:8x8 dp=8,tp=8,ep=64 b:64 p:1024 w:f8e4m3fn
Llama-3.1-8B v6e-8 pp=8 b:16 p:1024
Llama-3.1-8B v6e-8 dp=8 b:64 p:256
Qwen3-32B v6e-8 fsdp=8 b:16 p:2048
Llama-3.1-8B v5e-8 fsdp=8 b:8 p:1024 loop:unroll layers:8
Llama-3.1-8B v6e-8 tp=8 b:8 p:1024 partitioner:auto
Llama-3.1-8B v6e-8 tp=4,fsdp=2 b:32 p:1024
Qwen3-4B v6e:1x1 tp=1 b:32 p:1024
Llama-3.3-70B v6e-8 tp=8 b:1 p:32768
Qwen3-30B-A3B v6e-8 tp=8,ep=8 b:8 p:1024 loop:unroll layers:4
DeepSeek-V2-Lite v6e-8 dp=2,tp=4,ep=8 b:8 p:1024 loop:unroll layers:4
gpt-oss-120b v6e-8 tp=8,ep=8 b:8 p:1024 loop:unroll layers:4
Mixtral-8x7B-v0.1 v6e-8 tp=8,ep=8 b:16 p:1024
Llama-3.3-70B v5e-16 tp=16 b:32 p:1024 w:s8 c:s8
Llama-3.1-8B v6e-8 tp=8 b:1 p:128
Llama-3.1-8B v6e-8 tp=8 b:256 p:128
Qwen3-30B-A3B v6e-8 dp=8,ep=8 b:64 p:512
Llama-3.3-70B v6e-8 tp=8 b:64 p:4096
DeepSeek-V3.2 v5p:4x4x4 dp=8,tp=8,ep=64 b:64 p:1024
Llama-3.1-8B v5p:2x2x1 tp=2,dp=2 b:16 p:4096
Llama-3.1-8B v6e-8 tp=8,sp b:64 p:4096
Llama-3.1-8B v6e-8 cp=2,tp=4 b:8 p:4096 context:allgather
Qwen3-8B v6e-4 tp=4 b:64 p:2048
DeepSeek-V3.1-Base v5p:4x4x8 dp=16,tp=8,ep=128 b:256 p:2048 w:f8e4m3fn
gpt-oss-120b tpu7x-8 dp=4,tp=2,ep=8 b:64 p:1024
Llama-3.1-8B v6e-8 tp=8 b:2 p:1000
DeepSeek-V4-Flash-Base v6e:8x8 dp=8,tp=8,ep=64 b:64 p:1024
DeepSeek-V2-Lite v6e-8 tp=8 b:4 p:8192
Llama-3.1-8B v6e-8 tp=8 b:8 p:1024 w:s8 loop:unroll layers:4
Qwen3-32B v6e-8 tp=8 b:8 p:1024 loop:unroll layers:8
Llama-3.1-8B v6e-8 pp=2,tp=4 b:32 p:4096
Qwen3-30B-A3B v6e-8 tp=8 b:64 p:1024
DeepSeek-V3.1-Base v6e:16x16 dp=32,tp=8,ep=256 b:1024 p:1024 w:f8e4m3fn
gpt-oss-120b v6e-8 tp=8 b:64 p:1024 layers:4
Qwen3-30B-A3B v6e:2x2 tp=4,ep=4 b:4 p:1024 loop:unroll layers:8
gpt-oss-120b v6e-8 tp=8 b:64 p:1024
"""
CASES = tuple(GridCase(line=line) for line in LINES.strip().splitlines())


def compile_case(case: GridCase, file: Path) -> None:
    """Compiles the programs of a case in this process, and writes their memory analyses."""
    from meshscope.backends.compile.worker import (  # noqa: PLC0415  only in the child
        compile_program,
        set_environment,
    )

    set_environment()
    experiment = case.experiment
    with TemporaryDirectory() as folder:
        rows = [
            {"phase": phase.value, "chunk": chunk}
            | compile_program(experiment, phase, chunk, Path(folder))["memory"]
            for phase in experiment.phases
            for chunk in (-1, 0)[: 1 + (len(experiment.programs(phase)) > 1)]
        ]
    file.write_text(json.dumps(rows), encoding="utf-8")


def compile_missing(cache: Path) -> None:
    """Compiles the missing cases, each in its own process; a failed one is reported and skipped."""
    for number, case in enumerate(CASES):
        if not (cache / case.file_name).exists():
            command = [sys.executable, __file__, str(cache), str(number)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                print(f"{case.line}: {done.stderr.splitlines()[-1:]}", file=sys.stderr, flush=True)


def write_table(cache: Path) -> None:
    """One row per program: the case and the compiler's memory analysis in bytes.

    Cases that the folder lacks keep the rows that they have.
    """
    kept = _stored_rows()
    with CSV.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for case in CASES:
            file = cache / case.file_name
            made = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
            for row in kept.get(case.line, ()) if made is None else made:
                writer.writerow({"case": case.line, **row})


def _stored_rows() -> dict[str, list[dict[str, str]]]:
    """The rows of each case in the table."""
    rows: dict[str, list[dict[str, str]]] = {}
    with CSV.open() as stream:
        for row in csv.DictReader(stream):
            rows.setdefault(row["case"], []).append(row)
    return rows


@dataclass(frozen=True, kw_only=True)
class JudgedCase:
    """The memory of a case by the compiler, the largest of its programs each, and the estimate.

    `argument_bytes` are weights, cache and the inputs of a step, with their padding.
    """

    case: GridCase
    argument_bytes: int
    temp_bytes: int
    estimate: TempEstimate

    @property
    def is_inside(self) -> bool:
        """Whether the interval of the estimate contains the compiler's figure."""
        return self.estimate.low_bytes <= self.temp_bytes <= self.estimate.high_bytes

    @property
    def is_fitted(self) -> bool:
        """Whether the rules were made with this case."""
        return self.case in CASES[:N_FITTED]


def judged_cases() -> tuple[JudgedCase, ...]:
    """The compiled cases beside their estimates."""
    rows = _stored_rows()
    judged: list[JudgedCase] = []
    for case in CASES:
        estimate = temp_estimate(case.experiment) if case.line in rows else None
        if estimate is not None:
            largest = {
                name: max(int(row[name]) for row in rows[case.line])
                for name in ("argument_bytes", "temp_bytes")
            }
            judged.append(JudgedCase(case=case, estimate=estimate, **largest))
    return tuple(judged)


def print_table() -> None:
    """The rows of docs/evidence/memory.md."""
    print("| model, slice, plan, options | rules | compiled | estimate | interval | inside |")
    print("|---|---|---|---|---|---|")
    for judged in judged_cases():
        estimate = judged.estimate
        cells = (
            judged.case.line,
            "fitted" if judged.is_fitted else "judged",
            f"{judged.temp_bytes / 2**30:.2f}",
            f"{estimate.value_bytes / 2**30:.2f}",
            f"{estimate.low_bytes / 2**30:.2f} to {estimate.high_bytes / 2**30:.2f}",
            "yes" if judged.is_inside else "NO",
        )
        print("|", " | ".join(cells), "|")


def main() -> None:
    """Compiles what is missing and rewrites the table; with a number, compiles that case.

    Without a folder, prints the table beside the estimates.
    """
    if len(sys.argv) == 1:
        print_table()
        return
    cache, *numbers = Path(sys.argv[1]), *sys.argv[2:]
    if numbers:
        case = CASES[int(numbers[0])]
        compile_case(case, cache / case.file_name)
        return
    cache.mkdir(parents=True, exist_ok=True)
    compile_missing(cache)
    write_table(cache)


if __name__ == "__main__":
    main()
