"""Kineto traces of our own making: the events that the PyTorch profiler writes for a rank."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CUSTOM = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, int)"
GEMM = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT"
BASE_NS = 1_760_000_000_000_000_000


def event(cat: str, name: str, pid: int, tid: int, ts: float, dur: float, args: Event) -> Event:  # noqa: PLR0917
    times = {"ts": ts, "dur": dur}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def kernel(name: str, ts: float, dur: float, *, stream: int = 7, **args: object) -> Event:
    facts = {"device": 0, "stream": stream, **args}
    return event("kernel", name, 0, stream, ts, dur, facts)


def collective(
    name: str, ts: float, dur: float, ranks: Sequence[int], n: int, *, kind: str = "allreduce",
    n_out: int | None = None, dtype: str = "BFloat16", group: str = "", **args: object,
) -> Event:  # fmt: skip
    facts = {
        "Collective name": kind, "In msg nelems": n, "Out msg nelems": n if n_out is None else n_out,
        "dtype": dtype, "Group size": len(ranks), "Process Group Ranks": str(list(ranks)),
        "Process Group Description": group or "undefined", "Process Group Name": "1",
    }  # fmt: skip
    return kernel(name, ts, dur, stream=20, **facts, **args)


def launch(ts: float, correlation: int, *, tid: int = 1) -> Event:
    return event("cuda_runtime", "cudaLaunchKernel", 9, tid, ts, 1.0, {"correlation": correlation})


def annotation(name: str, ts: float, dur: float, **args: object) -> Event:
    return event("user_annotation", name, 9, 1, ts, dur, args)


def document(events: Iterable[Event], *, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": list(events),
        "traceName": "/tmp/trace.json",
    }


def write(path: Path, content: object) -> Path:
    """Writes JSON, gzipped if the name ends in .gz."""
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def vllm_step(
    name: str,
    ts: float,
    *,
    rank: int,
    payload: int,
    ranks: Sequence[int],
    first: int,
    skew: float = 0,
) -> list[Event]:
    """A step that launches a GEMM, an NCCL all-reduce and a custom one; kernels start 100 us later."""
    at = ts + 100 + skew
    return [
        annotation(name, ts, 50.0),
        *(launch(ts + 5 + i, first + i) for i in range(3)),
        kernel(GEMM, at, 30.0, correlation=first),
        collective(
            NCCL, at + 20 - 5 * rank, 20.0 + 5 * rank, ranks, payload, correlation=first + 1
        ),
        kernel(CUSTOM, at + 45, 6.0, correlation=first + 2),
    ]
