"""Kernels that exchange rows with other chips themselves: their row, bytes and work.

The text is hand-written after the signature of tpu-inference's fused_ep_moe: 64 tokens of a device with 8 of
256 experts each, 32 experts on each of 8 devices, width 7168 and 2048.
"""

from fractions import Fraction
from pathlib import Path

import pytest
from made_hlo import rows_in, timed_text
from tables import stored

from meshscope.events.enums import Kind, Part, Phase
from meshscope.readers.hlo.parse import parse_hlo
from meshscope.readers.hlo.scopes import with_scopes

KERNEL = "fused-moe-k_8-bt_64_64-bf_1024_1024-bd1_1024_1024-bd2_1024_1024"
TEXTS = stored(Path(__file__).with_suffix(".yaml"))["texts"]
STEP = TEXTS["STEP"]


def _read(name: str, mesh: str):
    text = STEP.replace("NAME", name)
    (row,) = rows_in(with_scopes(parse_hlo(text, "s")), mesh, default_phase=Phase.DECODE)
    return row, timed_text(text, "v6e-8", mesh, phase=Phase.DECODE, change=with_scopes).time


def test_the_exchange_has_the_bytes_of_the_rows_there_and_back() -> None:
    row, _ = _read(KERNEL, "data=1,model=8")
    rows_bytes = 64 * 8 * 7168 * 2
    assert (row.kind, row.axis, row.group_size) == (Kind.ALL_TO_ALL, "model", 8)
    assert (row.payload_bytes, row.wire_bytes) == (2 * rows_bytes, Fraction(7, 8) * 2 * rows_bytes)
    assert (row.layer, row.part, row.axis_reason) == (3, Part.MOE_EXPERTS, None)
    assert row.algorithm == f"kernel {KERNEL}, balanced routing"


def test_the_kernel_computes_while_it_communicates() -> None:
    """The weights of all 32 experts, as 4,096 draws from 256 experts miss none of them."""
    _, time = _read(KERNEL, "model=8")
    (part,) = [p for p in time.parts if p.part == "moe.experts"]
    assert part.flops == 2 * 64 * 8 * 3 * 7168 * 2048
    assert part.hbm_bytes == pytest.approx(32 * 3 * 7168 * 2048 * 2, rel=1e-3)
    assert time.step.value_s == pytest.approx(part.compute_s + part.exposed_s)
    assert part.compute_s > part.collective_s > 0
    assert part.exposed_s == 0
    assert any("balanced routing of 512 rows over 256 experts" in note for note in time.notes)


def test_each_block_of_tokens_reads_the_experts_again() -> None:
    """In a block of 16 tokens, 1,024 draws miss 2 % of 256 experts."""
    bytes_of_blocks = []
    for n_tokens in (64, 16):
        _, time = _read(KERNEL.replace("bt_64", f"bt_{n_tokens}"), "model=8")
        (part,) = [p for p in time.parts if p.part == "moe.experts"]
        bytes_of_blocks.append(part.hbm_bytes)
    once, four_times = bytes_of_blocks
    assert four_times == pytest.approx(4 * (1 - (1 - 1 / 256) ** 1024) * once, rel=1e-3)


def test_devices_of_an_unknown_axis_are_said() -> None:
    row, _ = _read(KERNEL, "x=2,y=4")
    assert row.axis == "x+y"  # both together are the 8 devices of the experts
    row, _ = _read(KERNEL.replace("k_8", "k_16"), "x=2,y=2,z=2")
    assert row.payload_bytes == 2 * 64 * 16 * 7168 * 2


def test_another_communicating_kernel_is_an_unknown_with_its_name() -> None:
    row, time = _read("my_ring_matmul", "model=8")
    assert (row.kind, row.payload_bytes, row.wire_bytes) == (Kind.PERMUTE, None, None)
    assert row.algorithm == "kernel my_ring_matmul"
    assert "the kernel does not declare how many bytes it sends" in (row.axis_reason or "")
    assert any("unknown bytes" in note for note in time.notes)
