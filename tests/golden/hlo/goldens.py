"""The golden files: their programs, sizes and slices. Needs no JAX."""

import json
from dataclasses import dataclass
from pathlib import Path

GOLDEN_DIR = Path(__file__).parent
JAX_VERSIONS = ("0.10.2", "0.12.0.1")
HEAD_DIM = 64


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One file: its program, slice and global sizes."""

    topology: str
    axes: tuple[tuple[str, int], ...]
    program: str = "decoder"
    phase: str = "prefill"
    is_sp: bool = False
    is_scanned: bool = False
    is_auto: bool = False
    batch: int = 4
    prompt: int = 128
    layers: int = 3
    hidden: int = 512
    ffn: int = 2048
    heads: int = 8
    vocab: int = 1024
    n_slices: int = 1
    # of libtpu; such a program compiles in a separate process. Those in use spread an all-gather over
    # concurrent fusions (newer libtpu: v5e only).
    flags: tuple[str, ...] = ()

    @property
    def tp(self) -> str | None:
        return "tp" if "tp" in dict(self.axes) else None

    @property
    def data(self) -> str | None:
        return next((name for name in ("dp", "fsdp") if name in dict(self.axes)), None)

    @property
    def fsdp(self) -> str | None:
        return "fsdp" if "fsdp" in dict(self.axes) else None

    @property
    def n_tp(self) -> int:
        return dict(self.axes).get("tp", 1)

    @property
    def steps(self) -> int:
        return 1 if self.phase == "decode" else self.prompt

    @property
    def sequence(self) -> str | None:
        return self.tp if self.is_sp and self.phase == "prefill" else None


GOLDENS = {
    name: Golden(**settings | {"axes": tuple(settings["axes"].items())})
    for name, settings in json.loads((GOLDEN_DIR / "goldens.json").read_text()).items()
}
