"""The examples for a user's own function, and those of the notebook."""

import json
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from programs import (
    DECODE,
    EXPERTS,
    LOGITS,
    MIXTURE,
    REPLICATED,
    SLICE,
    SPLIT,
    array,
    data_parallel,
    decode,
    decode_until_all_end,
    experts,
    experts_of_first_device,
    logits,
    logits_in_f32,
    mixture,
    mixture_without_constraint,
)

import meshscope
from meshscope.api.check import Communication

pytestmark = [pytest.mark.slow, pytest.mark.tpu]


def compiled(
    function: object, arguments: tuple[object, ...], axis: str, size: int = 4
) -> Communication:
    run = meshscope.compile(function, *arguments, topology=SLICE, mesh={axis: size})
    return Communication(run=run)


def test_weights_that_are_split_over_the_batch_axis_are_gathered() -> None:
    compiled(data_parallel, REPLICATED, "dp").none()
    with pytest.raises(AssertionError, match=r"1 x all_gather bf16\[256,512\] over dp"):
        compiled(data_parallel, SPLIT, "dp").none("all_gather", axis="dp")


def test_a_mixture_without_a_constraint_gathers_instead_of_exchanging() -> None:
    good = compiled(mixture, MIXTURE, "ep")
    good.expect(all_to_all=2, axis="ep")
    good.none("all_gather")
    spoiled = compiled(mixture_without_constraint, MIXTURE, "ep")
    with pytest.raises(AssertionError, match="all_gather"):
        spoiled.none("all_gather")


def test_one_boolean_is_reduced_over_all_devices_in_every_step() -> None:
    compiled(decode, DECODE, "dp").none("all_reduce")
    # The compiler widens the boolean.
    with pytest.raises(AssertionError, match=r"1 x all_reduce u32\[\] over dp"):
        compiled(decode_until_all_end, DECODE, "dp").none("all_reduce")


def test_logits_in_f32_send_twice_the_bytes() -> None:
    n_bytes = 16 * 4096 * 2 * 3 / 4
    compiled(logits, LOGITS, "tp").expect(all_gather=1, max_wire_bytes=n_bytes)
    with pytest.raises(AssertionError, match=r"wire_bytes 197 kB, at most 98\.3 kB"):
        compiled(logits_in_f32, LOGITS, "tp").expect(all_gather=1, max_wire_bytes=n_bytes)


def test_a_model_that_skips_experts_is_far_below_its_flops() -> None:
    n_flops = 2 * 8 * 64 * 256 * 512
    compiled(experts, EXPERTS, "dp").expect(min_flops=n_flops)
    with pytest.raises(AssertionError, match=r"flops 1\.678e\+07, at least 1\.342e\+08"):
        compiled(experts_of_first_device, EXPERTS, "dp").expect(min_flops=n_flops)


def test_an_equinox_model_and_its_gradients() -> None:
    model = eqx.nn.MLP(64, 64, 128, depth=1, key=jax.random.key(0))

    @eqx.filter_jit
    def gradients(model: eqx.Module, x: jax.Array) -> eqx.Module:
        return eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x)))(model)

    comm = compiled(gradients, (model, array(64, 64, spec=P("dp"), dtype=jnp.float32)), "dp")
    comm.none("all_gather")
    comm.expect(all_reduce=3, axis="dp")  # the gradient of the last bias is a constant
    lines = {row.source_line.rpartition("/")[2] for row in comm.run.record.rows}
    assert all(line.startswith("test_examples.py:") for line in lines)


DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOK = DOCS / "function.ipynb"


def test_every_cell_runs_and_rows_name_their_cell(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # output in the file would be of some version
            text = "".join(cell["source"])
            exec(compile(text, str(tmp_path / f"cell{number}.py"), "exec"), names)
    (row,) = names["run"].record.rows
    assert (row.kind, row.axis) == ("all_reduce", "tp")
    assert row.source_line == f"{tmp_path / 'cell1.py'}:10"
    gather, _ = names["split"].explain()
    assert (gather.row.kind, gather.row.axis) == ("all_gather", "dp")
    assert gather.row.source_line == f"{tmp_path / 'cell1.py'}:9"
    assert (gather.remedy or "").startswith("pass up whole")
    assert names["comparison"].verdict == "different"
    assert names["run"]._repr_html_()


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "your-program.md"
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(example, str(page), "exec"), {})
    assert "all_reduce" in capsys.readouterr().out
