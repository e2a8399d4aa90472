"""A budget refuses what the program does not have: nothing is over a misspelled axis, so every limit would be kept."""

from pathlib import Path

import pytest
from tables import table

import meshscope
from meshscope.api.check import Communication

EXPERTS = "Qwen/Qwen3-30B-A3B"
PROGRAM = """\
[[program]]
model = "{model}"
topology = "v6e-8"
plan = "{plan}"
output = {output}
layers = 2
batch = 8
predict = true
[[program.budget]]
{budget}
max_count = 1000
"""


def checked(
    tmp_path: Path, budget: str, *, plan: str = "tp=8", output: int = 128
) -> meshscope.MeshscopeError | None:
    """The refusal of the budget, if it is refused."""
    path = tmp_path / "budget.toml"
    path.write_text(PROGRAM.format(model=EXPERTS, plan=plan, budget=budget, output=output))
    try:
        assert meshscope.check(path).is_kept
    except meshscope.MeshscopeError as error:
        return error
    return None


@table
def test_a_filter_that_selects_nothing_by_mistake_is_refused_with_the_known_names(
    tmp_path, budget, options, message
) -> None:
    error = checked(tmp_path, budget, **options)
    assert error is not None
    assert str(error).startswith(f"{tmp_path / 'budget.toml'}:")
    assert message in str(error)


@pytest.mark.parametrize(
    ("axis", "plan"),
    [("dp", "tp=8,dp=1"), ("dp", "tp=8"), ("tp", "dp=8,tp=1"), ("pp", "tp=8"), ("dp+tp", "tp=8")],
)
def test_nothing_crosses_an_axis_of_size_one(tmp_path: Path, axis: str, plan: str) -> None:
    path = tmp_path / "budget.toml"
    budget = f'axis = "{axis}"\nmax_wire_bytes = 0'
    path.write_text(PROGRAM.format(model=EXPERTS, plan=plan, budget=budget, output=128))
    (program,) = meshscope.check(path).programs
    assert [(check.value, check.is_kept) for check in program.checks] == [(0, True), (0, True)]


@pytest.mark.parametrize("axis", ["dp", "tp", "dp+tp", "tp+dp"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_axes_of_the_program_are_accepted_in_either_order(tmp_path, axis, phase) -> None:
    assert checked(tmp_path, f'axis = "{axis}"\nphase = "{phase}"', plan="dp=2,tp=4,ep=8") is None


def test_joined_axes_select_the_same_collectives_in_either_order() -> None:
    run = meshscope.predict(EXPERTS, topology="v6e-8", plan="dp=2,tp=4,ep=8", batch=8, layers=2)
    comm = Communication(run=run)
    for axis in ("dp+tp", "tp+dp"):
        with pytest.raises(
            AssertionError, match=rf"all_to_all over {axis.replace('+', '.')}: count"
        ):
            comm.none("all_to_all", axis=axis)


@table
def test_the_fixture_refuses_what_the_program_does_not_have(method, kinds, facts, message) -> None:
    run = meshscope.predict("Qwen/Qwen3-4B", topology="v6e-8", plan="tp=8", layers=2)
    comm = Communication(run=run)
    with pytest.raises(meshscope.MeshscopeError) as refused:
        getattr(comm, method)(*kinds, **facts)
    assert message in str(refused.value)


def test_a_program_on_one_device_has_axes_of_size_1() -> None:
    run = meshscope.predict("Qwen/Qwen3-4B", topology="v6e-1", plan="tp=1", layers=2)
    comm = Communication(run=run)
    comm.none(axis="tp")
    comm.none(axis="dp")
    with pytest.raises(meshscope.MeshscopeError, match=r"no axis 'dpp'\. Known: cp, dp, fsdp"):
        comm.none(axis="dpp")
