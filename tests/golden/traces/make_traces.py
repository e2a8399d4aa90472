"""Makes the golden traces: what vLLM's profiler would write for Qwen3-4B with tp=2 on two H100.

No GPU ran: names, arguments and order are those of vLLM and Kineto, and times are invented. A
prefill step runs NCCL all-reduces with sizes; decode steps run vLLM's own all-reduce in a CUDA
graph, whose kernels share one launch and carry no sizes.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "vllm-tp2"
BASE_NS = 1_760_000_000_000_000_000
N_LAYERS, HIDDEN, N_RANKS = 36, 2560, 2
PREFILL = "execute_2056_context_2(sq2048sk2048sqsq2097152sqsk2097152)_generation_8(sq8sk9000sqsq8sqsk9000)"
DECODE = "execute_10_context_0(sq0sk0sqsq0sqsk0)_generation_10(sq10sk11058sqsq10sqsk11058)"
STEPS = ((PREFILL, 2056, 40.0), (DECODE, 10, 4.0), (DECODE, 10, 4.0), (DECODE, 10, 4.0))
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CUSTOM = (
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals)"
)
Event = dict[str, Any]


def main() -> None:
    """Writes a trace for each rank, beside the card and the results of a benchmark."""
    FOLDER.mkdir(exist_ok=True)
    for rank in range(N_RANKS):
        document = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": rank, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": {
                "backend": "nccl", "rank": rank, "world_size": N_RANKS,
                "pg_config": [{"pg_name": "3", "pg_desc": "undefined", "pg_size": 2, "ranks": [0, 1]}],
            },
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": list(events(rank)),
        }  # fmt: skip
        text = json.dumps(document).encode()
        (FOLDER / f"rank{rank}.pt.trace.json.gz").write_bytes(gzip.compress(text, mtime=0))


def events(rank: int) -> Iterator[Event]:
    """The steps of one rank; the other one starts its collectives up to 6 us later."""
    at = 1000.0
    for index, (name, n_tokens, scale) in enumerate(STEPS):
        yield host("user_annotation", name, at, 300.0, {})
        yield host("cuda_runtime", "cudaGraphLaunch", at + 20, 9.0, {"correlation": index + 1})
        begin = at + 60
        for layer in range(-1, N_LAYERS):
            for part in ("embed",) if layer < 0 else ("attention", "mlp"):
                begin = yield from part_kernels(
                    part, begin, scale, index=index, n_tokens=n_tokens, rank=rank
                )
        yield kernel("nvjet_hsh_lm_head", 7, begin, scale * 6, index=index)
        at = begin + scale * 6 + 200


def part_kernels(
    part: str, begin: float, scale: float, *, index: int, n_tokens: int, rank: int
) -> Iterator[Event]:
    """A GEMM, and the all-reduce of its result, which starts in the shadow of the GEMM's end."""
    yield kernel(f"nvjet_hsh_{part}", 7, begin, scale * 5, index=index)
    ready = begin + scale * 5 - 1.0 + 3.0 * rank
    end = begin + scale * 6 + 8
    if n_tokens > 64:
        args = {
            "Collective name": "allreduce", "In msg nelems": n_tokens * HIDDEN,
            "Out msg nelems": n_tokens * HIDDEN, "Group size": N_RANKS, "dtype": "BFloat16",
            "Process Group Name": "3", "Process Group Description": "undefined",
            "Process Group Ranks": str(list(range(N_RANKS))),
        }  # fmt: skip
        yield kernel(NCCL, 20, ready, end - ready, index=index, args=args)
    else:
        yield kernel(CUSTOM, 7, ready + 1, end - ready - 1, index=index)
    return end


def kernel(
    name: str, stream: int, ts: float, dur: float, *, index: int, args: Event | None = None
) -> Event:
    """A kernel of the step's graph."""
    facts = {"device": 0, "stream": stream, "correlation": index + 1, **(args or {})}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": facts}  # fmt: skip


def host(cat: str, name: str, ts: float, dur: float, args: Event) -> Event:
    """An event of the host."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": 1, "ts": ts, "dur": dur, "args": args}  # fmt: skip


if __name__ == "__main__":
    main()
