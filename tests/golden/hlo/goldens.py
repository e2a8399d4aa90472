"""The golden files: their programs, sizes and slices. Needs no JAX."""

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
    flags: tuple[str, ...] = ()  # of libtpu; such a program compiles in a separate process

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


# libtpu flags that spread an all-gather over concurrent fusions (newer libtpu: v5e only).
ASYNC_FUSION = (
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
)

TP8 = (("tp", 8),)
FSDP8 = (("fsdp", 8),)
DP2_TP4 = (("dp", 2), ("tp", 4))
FSDP2_TP4 = (("fsdp", 2), ("tp", 4))


def _loops(name: str, **settings: object) -> dict[str, Golden]:
    """The same decoder with its layers unrolled and scanned."""
    return {
        f"{name}_unroll": Golden(**settings),  # type: ignore[arg-type]
        f"{name}_scan": Golden(**settings, is_scanned=True),  # type: ignore[arg-type]
    }


GOLDENS: dict[str, Golden] = {
    **_loops("v6e_tp8_prefill", topology="v6e:2x4", axes=TP8),
    **_loops("v6e_tp8_decode", topology="v6e:2x4", axes=TP8, phase="decode", vocab=128256),
    **_loops("v5e_dp2tp4_prefill", topology="v5e:2x4", axes=DP2_TP4),
    **_loops("v4_dp2tp4_decode", topology="v4:2x2x2", axes=DP2_TP4, phase="decode"),
    **_loops("v5p_fsdp2tp4sp_prefill", topology="v5p:2x2x2", axes=FSDP2_TP4, is_sp=True),
    **_loops("tpu7x_fsdp2tp4_prefill", topology="tpu7x:2x2x1", axes=FSDP2_TP4),
    "v6e_tp8_decode_auto": Golden(
        topology="v6e:2x4", axes=TP8, phase="decode", is_auto=True, batch=1, vocab=128256, layers=2
    ),
    "v6e_tp8sp_prefill_auto": Golden(
        topology="v6e:2x4",
        axes=TP8,
        is_sp=True,
        is_auto=True,
        batch=8,
        prompt=1024,
        hidden=4096,
        ffn=14336,
        heads=32,
        layers=2,
    ),
    "v5e_fsdp8_prefill_auto_async": Golden(
        topology="v5e:2x4",
        axes=FSDP8,
        is_auto=True,
        batch=8,
        prompt=512,
        hidden=2048,
        ffn=8192,
        heads=16,
        layers=2,
        flags=ASYNC_FUSION,
    ),
    "2xv6e_fsdp2tp4_prefill": Golden(topology="v6e:2x2", axes=FSDP2_TP4, n_slices=2, layers=2),
    "2xv6e_tp8_decode": Golden(topology="v6e:2x2", axes=TP8, phase="decode", n_slices=2, layers=2),
    "2xv6e_fsdp4tp2sp_prefill_scan": Golden(
        topology="v6e:2x2",
        axes=(("fsdp", 4), ("tp", 2)),
        is_sp=True,
        is_scanned=True,
        n_slices=2,
    ),
    "2xv6e_fsdp4tp2sp_prefill_unroll": Golden(
        topology="v6e:2x2", axes=(("fsdp", 4), ("tp", 2)), is_sp=True, n_slices=2
    ),
    "2xv6e_tp8sp_prefill": Golden(topology="v6e:2x2", axes=TP8, is_sp=True, n_slices=2, layers=2),
    "2xv6e_across_slices": Golden(
        topology="v6e:2x2", axes=DP2_TP4, n_slices=2, program="across_slices"
    ),
    "v6e_combined": Golden(topology="v6e:2x4", axes=DP2_TP4, program="combined"),
    "v6e_several": Golden(topology="v6e:2x4", axes=DP2_TP4, program="several"),
    "v6e_windowed_scan": Golden(
        topology="v6e:2x4", axes=TP8, program="windowed", hidden=16384, ffn=8192, layers=4
    ),
    "v6e_kernel": Golden(topology="v6e:2x4", axes=TP8, program="kernel"),
    "v6e_local_kernels": Golden(topology="v6e:2x4", axes=TP8, program="local_kernels"),
}
