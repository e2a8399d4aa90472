"""Scopes in an op_name, as the programs write them and the readers parse them."""

from tables import table

from meshscope.events.enums import Part, Phase
from meshscope.readers.hlo.attribution import Scope, same_name, scope_of

Range = list[int] | None


def test_pipeline_scopes_name_stages_and_microbatches() -> None:
    scope = scope_of(
        "jit(prefill)/shard_map/prefill/while/body/closed_call/cond/branch_1_fun/stages1-2by6/"
        "microbatches2of5/while/body/closed_call/layers6-11/mlp/psum"
    )

    assert scope == Scope(
        phase=Phase.PREFILL,
        layers=range(6, 12),
        part=Part.MLP,
        stages=range(1, 3),
        stage_layers=6,
        n_microbatches=2,
        n_ticks=5,
    )
    assert (scope.n_layers, scope.n_times) == (6, 30)
    assert scope.missing is None


@table
def test_parts_between_layers_belong_to_stages(path: str, stages: Range, part: Part) -> None:
    scope = scope_of(path)

    assert (scope.stages, scope.part, scope.n_times) == (stages and range(*stages), part, 1)


@table
def test_of_nested_parts_with_experts_the_innermost_counts(path: str, part: Part) -> None:
    assert scope_of(path).part is part


@table
def test_scope_is_read_from_the_path(
    op_name: str | None, phase: Phase | None, layers: Range, part: Part | None, missing: str | None
) -> None:
    scope = scope_of(op_name)
    assert scope == Scope(phase=phase, layers=layers and range(*layers), part=part)
    assert scope.missing == missing


def test_names_are_equal_up_to_uniquifiers() -> None:
    assert same_name("model.26/layers.0.3/mm", "model.1/layers.0.5/mm.4")
    assert not same_name("a/psum", "b/psum")
    assert not same_name(None, None)
