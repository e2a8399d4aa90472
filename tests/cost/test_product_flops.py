"""FLOPs of matrix products, in the forms that the compiler writes them."""

from made_hlo import module_text
from tables import table

from meshscope.cost.array_traffic import products
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.parse import parse_hlo

# 128 heads, each [1024, 128] x [128, 512].
HEADS, ROWS, WIDTH, RANK = 128, 1024, 128, 512


@table
def test_a_batched_product_has_the_flops_of_its_heads(left, right, result, product) -> None:
    """Each head counts once, whatever window it is written with."""
    entry = (
        f"  %l = {left} parameter(0)\n  %r = {right} parameter(1)\n  ROOT %p = {result} {product}"
    )
    module = parse_hlo(module_text(entry, header=""), "test.hlo")
    rank = 7168 if "7168" in result else RANK
    in_entry = products(Dataflow(module), module.entry, module.entry.root)
    assert sum(p.flops for p in in_entry) == 2 * HEADS * ROWS * WIDTH * rank
