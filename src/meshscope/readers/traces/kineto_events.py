"""Events of Kineto traces: the fields that matter, and what an event of a category is read for."""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
# Names before PyTorch 1.11, and of other vendors' profilers (libkineto, ActivityType.cpp).
SYNONYMS = {
    "Kernel": "kernel",
    **dict.fromkeys(("Memcpy", "memcpy", "mlu_memcpy", "GCU_MEMCPY"), "gpu_memcpy"),
    **dict.fromkeys(("Memset", "memset", "mlu_memset", "GCU_MEMSET"), "gpu_memset"),
}


class Use(Enum):
    """What an event is read for."""

    OP = "op"
    LAUNCH = "launch"
    RANGE = "range"


USES: Mapping[str | None, Use] = {
    **dict.fromkeys((*COPIES, "kernel", *SYNONYMS), Use.OP),
    **dict.fromkeys(
        (
            *("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime", "Runtime"),
            *("privateuse1_driver", "xpu_runtime", "xpu_driver", "mtia_runtime", "mlu_runtime"),
            *("gcu_runtime", "gcu_driver", "runtime", "driver"),
        ),
        Use.LAUNCH,
    ),
    # Operators of old traces: their steps are among them.
    **dict.fromkeys(("user_annotation", "gpu_user_annotation", "Operator"), Use.RANGE),
}
# Events that are no ops of a device: host events, waits, arrows, and counters.
NO_OPS = frozenset(
    (
        *("cpu_op", "operator", "python_function", "Python", "cpu_instant_event", "Trace", "overhead"),
        *("ac2g", "async_cpu_to_gpu", "async_gpu", "fwdbwd", "forward_backward", "external_correlation"),
        *("cuda_sync", "cuda_event", "xpu_sync", "gcu_sync", "cuda_profiler_range", "Memory", "memory"),
        "glow_runtime",
    )
)  # fmt: skip
OPEN = {"B": 1, "E": -1}

Scalar = int | str | float | None


class KinetoArgs(msgspec.Struct, gc=False):
    """The arguments of an event that matter here."""

    stream: Scalar = None
    device: Scalar = None
    correlation: Scalar = None
    collective: str | None = msgspec.field(name="Collective name", default=None)
    n_in: int | None = msgspec.field(name="In msg nelems", default=None)
    n_out: int | None = msgspec.field(name="Out msg nelems", default=None)
    group_size: int | None = msgspec.field(name="Group size", default=None)
    dtype: str | None = None
    group_name: Scalar = msgspec.field(name="Process Group Name", default=None)
    group_text: str | None = msgspec.field(name="Process Group Description", default=None)
    ranks: str | list[int] | None = msgspec.field(name="Process Group Ranks", default=None)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b"null"))
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b"null"))


class KinetoEvent(msgspec.Struct, gc=False):
    """An event of any kind."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: Scalar = None
    tid: Scalar = None
    ts: float | None = None
    dur: float | None = None
    args: KinetoArgs | None = None


class OpKey(NamedTuple):
    """What distinguishes ops; sizes are None for kernels that carry no facts of a collective."""

    cat: str
    name: str
    collective: str | None = None
    n_in: int | None = None
    n_out: int | None = None
    group_size: int | None = None
    dtype: str | None = None
    group_name: str | None = None
    group_text: str | None = None
    ranks: str | None = None
