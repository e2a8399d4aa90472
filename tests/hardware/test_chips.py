"""Chips and slices: figures against independent sources, names, and notes on dtypes."""

from pathlib import Path

import pytest
from tables import read_rows, table

from meshscope.errors import SpecError
from meshscope.hardware.chips import (
    CHIP_ALIASES,
    CHIPS,
    GIB,
    PROFILED_CHIPS,
    ChipKind,
    chip_of,
    is_chip_named,
    precision_notes,
)
from meshscope.hardware.topology import parse_topology


def test_figures_agree_with_published_times_and_rates() -> None:
    """Scaling book, tpus.md: question 1, 200B bf16 parameters over 32 v4p in about 10 ms; question 5,
    bf16[8,128,8192] over two links of v5e in 188 us. Plane statistics of an XPlane from v6e: 918 TF/s,
    1637.99 GB/s. The tpu7x page: ICI 1200 GB/s per chip, both directions, over six links of a 3D torus.
    """
    v6e = CHIPS["v6e"]
    assert 200e9 * 2 / (32 * CHIPS["v4"].hbm_bytes_per_s) == pytest.approx(10e-3, rel=0.05)
    sent_s = 8 * 128 * 8192 * 2 / (2 * CHIPS["v5e"].link_bytes_per_s)
    assert sent_s == pytest.approx(188e-6, rel=0.02)
    assert (v6e.bf16_flops_per_s, v6e.hbm_bytes_per_s) == pytest.approx((918e12, 1637.99e9), 1e-3)
    assert 6 * 2 * CHIPS["tpu7x"].link_bytes_per_s == 1200e9


@pytest.mark.parametrize(
    ("name", "hbm_bytes"),
    [("v4", 30.75 * GIB), ("v6e", 31.25 * GIB), ("tpu7x", 94.75 * GIB), ("cpu", None)],
)
def test_programs_may_use_the_hbm_that_libtpu_leaves(name: str, hbm_bytes: float | None) -> None:
    assert CHIPS[name].device_hbm_bytes == hbm_bytes


def test_every_chip_has_a_source() -> None:
    assert all(chip.source for chip in CHIPS.values())


@pytest.mark.parametrize("alias", CHIP_ALIASES)
def test_aliases_are_case_insensitive(alias: str) -> None:
    assert chip_of(alias.upper()) is CHIPS[CHIP_ALIASES[alias]]


@pytest.mark.parametrize("name", PROFILED_CHIPS)
def test_gpus_without_published_rates_are_for_imports(name: str) -> None:
    chip = chip_of(name.upper(), is_imported=True)
    assert chip.source
    assert (chip.link_bytes_per_s, chip.hbm_bytes_per_s, chip.bf16_flops_per_s) == (None,) * 3
    with pytest.raises(SpecError, match=f"chip '{name}' has no rates .*only 'meshscope import'"):
        chip_of(name)


@table
def test_the_profilers_name_of_a_device_tells_its_chip(chip, device, *, is_named) -> None:
    assert is_chip_named(chip_of(chip, is_imported=True), device) is is_named


def test_an_unknown_chip_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"unknown chip 'v6'. Did you mean .*'v6e'"):
        chip_of("v6")


@table
def test_narrow_weights_are_multiplied_as_activations(chip, weights, expected) -> None:
    (note,) = precision_notes(weights, "bf16", CHIPS[chip])

    assert note.startswith(f"{expected}: bytes count as stored, products at the bf16 peak")


def test_bf16_and_gpus_have_no_note() -> None:
    assert not list(precision_notes("bf16", "bf16", CHIPS["v6e"]))
    assert not list(precision_notes("s8", "bf16", CHIPS["h100"]))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_other_activations_have_a_note(dtype: str) -> None:
    (note,) = precision_notes("bf16", dtype, CHIPS["v5e"])

    assert dtype in note
    assert "bf16" in note


def test_every_tpu_has_its_matrix_units() -> None:
    assert all(chip.narrow_dtypes for chip in CHIPS.values() if chip.kind is ChipKind.TPU)


@table
def test_dense_mxfp4_takes_longer_than_predicted(weights: str, *, has_note: bool) -> None:
    notes = precision_notes(weights, "bf16", CHIPS["v6e"])
    assert any("dense mxfp4" in note for note in notes) == has_note


@pytest.mark.parametrize(
    ("text", "name", "n_chips", "n_devices"),
    read_rows(Path(__file__).parent / "slices.csv", str, str, int, int),
)
def test_names_are_parsed_into_grid_and_counts(text, name, n_chips, n_devices) -> None:
    topology = parse_topology(text)
    assert (topology.name, topology.n_chips, topology.n_devices) == (name, n_chips, n_devices)
    assert parse_topology(topology.name) == topology


def test_devices_per_slice() -> None:
    assert parse_topology("4xtpu7x-8").devices_per_slice == 8


@table
def test_a_host_has_two_by_two_chips_unless_the_slice_is_smaller(
    text, bounds: tuple[int, int, int]
) -> None:
    assert parse_topology(text).host_bounds == bounds


@table
def test_an_invalid_topology_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(SpecError, match=remedy):
        parse_topology(text)
