"""Events of Kineto traces: the fields that matter, and what an event of a category is read for."""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

COPIES = frozenset({"gpu_memcpy", "gpu_memset"})


class Use(Enum):
    """What an event is read for."""

    OP = "op"
    LAUNCH = "launch"
    RANGE = "range"


USES: Mapping[str | None, Use] = {
    **dict.fromkeys((*COPIES, "kernel"), Use.OP),
    **dict.fromkeys(
        ("cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime"), Use.LAUNCH
    ),
    **dict.fromkeys(("user_annotation", "gpu_user_annotation"), Use.RANGE),
}
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
