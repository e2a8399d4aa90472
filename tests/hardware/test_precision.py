"""Notes on dtypes that a chip does not multiply, and dtypes that programs do not have."""

import pytest
from tables import table

from meshscope.hardware.chips import CHIPS, ChipKind, precision_notes


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


@pytest.mark.parametrize(
    ("weights", "has_note"),
    [("f4e2m1fn", True), ("f4e2m1fn_mlps", True), ("f4e2m1fn_experts", False), ("s4", False)],
)
def test_dense_mxfp4_takes_longer_than_predicted(weights: str, *, has_note: bool) -> None:
    notes = precision_notes(weights, "bf16", CHIPS["v6e"])
    assert any("dense mxfp4" in note for note in notes) == has_note
