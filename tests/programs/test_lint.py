"""Faults that are planted in programs, and published bugs, are found."""

import csv
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from planted import Case, outcomes, reported

import meshscope
from meshscope.events.enums import Phase
from meshscope.readers.lint.log import WASTE

pytestmark = pytest.mark.slow
COLUMNS, ROWS, WHOLE = P(None, "tp"), P("tp", None), P()
SHAPES = {COLUMNS: (16, 64), ROWS: (64, 32), WHOLE: (32,)}
BUG_SHAPES = {COLUMNS: (32, 64), ROWS: (64, 32), WHOLE: (16, 32)}


def groups(x: Any, w: Any, b: Any) -> Any:
    """A layer whose groups of columns have weights of their own, one group on each device."""
    return x @ w + b


def activated(x: Any, w: Any, b: Any) -> Any:
    whole = jax.nn.gelu(x @ w + 2 * b)
    return jax.lax.all_gather(whole, "tp", axis=1, tiled=True)


def normed(x: Any) -> Any:
    """A norm over the columns of each device, as heads and groups of state spaces have."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6)


def softmax_with_sink(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.softmax(x @ w + b, axis=-1)


def scaled_bias(x: Any, w: Any, b: Any) -> Any:
    return jax.lax.psum(x @ w + b / 8, "tp")


def largest(x: Any) -> Any:
    return jax.lax.pmax(jnp.sum(x, 1), "tp")


@pytest.mark.parametrize(
    ("function", "inputs", "result"),
    [
        (groups, (COLUMNS, ROWS, WHOLE), COLUMNS),
        (activated, (COLUMNS, ROWS, WHOLE), WHOLE),
        (normed, (COLUMNS,), COLUMNS),
        (softmax_with_sink, (COLUMNS, ROWS, WHOLE), COLUMNS),
        (scaled_bias, (COLUMNS, ROWS, WHOLE), WHOLE),
        (largest, (COLUMNS,), WHOLE),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_nothing_certain_is_found_in_a_correct_program(
    function: Callable[..., Any], inputs: tuple[P, ...], result: P, tmp_path: Path
) -> None:
    assert linted(function, inputs, result, tmp_path).n_certain == 0


def test_a_sum_of_what_the_program_computed_is_certain(tmp_path: Path) -> None:
    def residual(x: Any, w: Any, b: Any) -> Any:
        stream = jax.lax.psum(jnp.sum(x, 1, keepdims=True), "tp") + b
        return jnp.tanh(stream + x @ w)

    (finding,) = linted(residual, (COLUMNS, ROWS, WHOLE), COLUMNS, tmp_path).findings
    assert (finding.kind, finding.axis, finding.is_certain) == ("missing_reduction", "tp", True)


def test_a_partial_sum_that_is_returned_is_possible(tmp_path: Path) -> None:
    """Each device may return a part of its own: the text does not say how its result is split."""
    (finding,) = linted(lambda x, w: x @ w, (COLUMNS, ROWS), WHOLE, tmp_path).findings
    assert (finding.kind, finding.is_certain) == ("missing_reduction", False)


def silu_mlp(x: Any, w_in: Any, w_out: Any) -> Any:
    """An MLP whose hidden columns are split: each device has its part of the sum."""
    return jax.nn.silu(x @ w_in) @ w_out


def rms(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def layer(x: Any, w_in: Any, w_out: Any) -> Any:
    """A residual stream that the program computed, equal on all devices."""
    return rms(x + jax.lax.psum(silu_mlp(x, w_in, w_out), "tp"))


def own_rows(x: Any) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, 2 * jax.lax.axis_index("tp"), 2, 0)


def shared_expert_is_not_reduced(x: Any, w_in: Any, w_out: Any) -> Any:
    """tpu-inference 3435: the routed experts are reduced, the shared one is not."""
    stream = layer(x, w_in, w_out)
    routed = jax.lax.psum(silu_mlp(stream, w_in, w_out), "tp")
    return rms(stream + routed + silu_mlp(stream, 2 * w_in, w_out))


def experts_of_other_tokens_are_added(x: Any, w_in: Any, w_out: Any) -> Any:
    """tpu-inference 2248: each device has tokens of its own, and the sum over devices adds different tokens."""
    stream = layer(x, w_in, w_out)
    return jax.lax.psum(rms(own_rows(stream)), "tp")


def shared_expert_is_counted_by_every_device(x: Any, w_in: Any, w_out: Any) -> Any:
    """sglang 31475: a whole shared expert is added to the part of each device before the sum."""
    stream = layer(x, w_in, w_out)
    return rms(stream + jax.lax.psum(silu_mlp(stream, w_in, w_out) + stream, "tp"))


def sum_over_half_of_the_devices(x: Any, w_in: Any, w_out: Any) -> Any:
    """sglang 32511: the fused reduction takes the groups of one axis, and the sum is over two."""
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    stream = layer(x, w_in, w_out)
    summed = jax.lax.psum(silu_mlp(stream, w_in, w_out), "tp", axis_index_groups=groups)
    return rms(stream + summed)


def sum_is_never_combined(x: Any, w_in: Any, w_out: Any) -> Any:
    """sglang 36879: a communicator lacks the branch that reduces."""
    stream = layer(x, w_in, w_out)
    return rms(stream + silu_mlp(stream, w_in, w_out))


def reduced_then_scattered(x: Any, w_in: Any, w_out: Any) -> Any:
    """sglang 37199: an all-reduce, and a reduce-scatter of its result."""
    stream = layer(x, w_in, w_out)
    whole = jax.lax.psum(silu_mlp(stream, w_in, w_out), "tp")
    return rms(own_rows(stream) + jax.lax.psum_scatter(whole, "tp", tiled=True))


def shared_expert_is_reduced_twice(x: Any, w_in: Any, w_out: Any) -> Any:
    """vllm 49122: the shared expert reduces its output, and the runner reduces the sum again."""
    stream = layer(x, w_in, w_out)
    shared = jax.lax.psum(silu_mlp(stream, w_in, w_out), "tp")
    return rms(stream + jax.lax.psum(shared + silu_mlp(stream, 2 * w_in, w_out), "tp"))


def whole_shared_expert_is_reduced(x: Any, w_in: Any, w_out: Any) -> Any:
    """TensorRT-LLM 15922: a whole shared expert is added to the routed experts before their sum, not after it."""
    stream = layer(x, w_in, w_out)
    shared = jax.nn.silu(stream @ x.T) @ x
    return rms(stream + jax.lax.psum(silu_mlp(stream, w_in, w_out) + shared, "tp"))


def shared_expert_is_reduced_by_layer_and_runner(x: Any, w_in: Any, w_out: Any) -> Any:
    """tpu-inference 3155: the layer ignores that its caller reduces, which reduces a second time."""
    stream = layer(x, w_in, w_out)
    shared = jax.lax.psum(silu_mlp(stream, w_in, w_out), "tp")
    return rms(stream + jax.lax.psum(shared, "tp"))


def sum_of_attention_is_not_reduced(x: Any, w_in: Any, w_out: Any) -> Any:
    """tpu-inference 1625, as far as its class is known: a partial sum that is not reduced before the next norm."""
    return rms(layer(x, w_in, w_out) + rms(x) @ w_in @ w_out)


def sum_is_reduced_twice(x: Any, w_in: Any, w_out: Any) -> Any:
    """tpu-inference 2328, as far as its class is known: a sum that is reduced twice."""
    stream = layer(x, w_in, w_out)
    once = jax.lax.psum(silu_mlp(stream, w_in, w_out), "tp")
    return rms(stream + jax.nn.silu(jax.lax.psum(once, "tp")))


def experts_are_normalized_before_their_sum(x: Any, w_in: Any, w_out: Any) -> Any:
    """vllm-ascend 14345: each device normalizes its part of the sum over experts."""
    stream = layer(x, w_in, w_out)
    routed = rms(silu_mlp(stream, w_in, w_out))
    return rms(stream + jax.lax.psum(routed @ x.T @ x, "tp"))


@pytest.mark.parametrize(
    ("function", "kind", "is_certain"),
    [
        (shared_expert_is_not_reduced, "missing_reduction", True),
        (experts_of_other_tokens_are_added, "sum_of_parts", False),
        (shared_expert_is_counted_by_every_device, "replicated_counted_twice", True),
        (sum_over_half_of_the_devices, "missing_reduction", True),
        (sum_is_never_combined, "missing_reduction", True),
        (reduced_then_scattered, "double_reduction", True),
        (shared_expert_is_reduced_twice, "replicated_counted_twice", True),
        (whole_shared_expert_is_reduced, "replicated_counted_twice", True),
        (shared_expert_is_reduced_by_layer_and_runner, "double_reduction", True),
        (sum_of_attention_is_not_reduced, "missing_reduction", True),
        (sum_is_reduced_twice, "double_reduction", True),
        (experts_are_normalized_before_their_sum, "missing_reduction", False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_published_bug_is_found(
    function: Callable[..., Any], kind: str, *, is_certain: bool, tmp_path: Path
) -> None:
    shapes = (WHOLE, COLUMNS, ROWS)
    findings = linted(function, shapes, WHOLE, tmp_path, BUG_SHAPES).findings
    found_kinds = {(one.kind, one.is_certain) for one in findings if one.kind not in WASTE}
    assert found_kinds == {(kind, is_certain)}


def linted(
    function: Callable[..., Any],
    inputs: tuple[P, ...],
    result: P,
    folder: Path,
    shapes: Mapping[P, tuple[int, ...]] = SHAPES,
) -> Any:
    """The findings in the program over eight virtual devices."""
    mesh = jax.make_mesh((8,), ("tp",), devices=jax.devices("cpu")[:8])
    mapped = jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=result, check_vma=False)
    arguments = [
        jax.ShapeDtypeStruct(shapes[one], jnp.float32, sharding=NamedSharding(mesh, one))
        for one in inputs
    ]
    text = folder / "program.txt"
    text.write_text(jax.jit(mapped).lower(*arguments).compile().as_text())
    return meshscope.lint(text, mesh="tp=8")


DOCS = Path(__file__).parents[2] / "docs"
with (DOCS / "evidence/lint_mutants.csv").open() as file:
    MUTANTS = list(csv.DictReader(file))
REPEATED = (("cohere2", "tp=8,sp"), ("dots1", "dp=2,cp=2,tp=2"))
KINDS = {
    "all-reduce": "all-reduce",
    "reduce-scatter": "reduce-scatter",
    "all-gather": "all-gather",
    "all-to-all": "all-to-all, permute",
    "collective-permute": "all-to-all, permute",
}


def test_the_page_has_the_share_of_faults_that_are_reported() -> None:
    counts = {kind: Counter[str]() for kind in KINDS.values()}
    for row in MUTANTS:
        if row["changes_result"] == "True":
            counts[KINDS[row["collective"]]][row["reported"]] += 1
    expected = [
        f"| {kind} | {c.total()} | {c['certain']} | {c['possible']} | {c['no']} |"
        for kind, c in counts.items()
    ]
    page = (DOCS / "lint.md").read_text()
    assert [line for line in expected if line not in page] == []
    every = sum(counts.values(), Counter[str]())
    share = 1 - every["no"] / every.total()
    assert f"{share:.1%} of the faults".replace("%", " %", 1) in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case(config, plan, Phase.PREFILL) for config, plan in REPEATED],
    ids="-".join,
)
def test_stored_outcomes_can_be_repeated(case: Case) -> None:
    stored = {
        (row["name"], row["change"]): (row["changes_result"] == "True", row["reported"])
        for row in MUTANTS
        if (row["config"], row["plan"], row["phase"]) == case[:3] and row["loop"] == case.loop
    }
    (_, _, whole, mesh), *faults = outcomes(case)
    assert reported(whole, mesh) == "no"
    assert {
        (mutant.name, mutant.change): (changes, reported(text, mesh))
        for mutant, changes, text, mesh in faults
        if mutant is not None
    } == stored
