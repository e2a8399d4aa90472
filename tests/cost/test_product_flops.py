"""FLOPs of matrix products, in the forms that the compiler writes them."""

import pytest
from made_hlo import module_text

from meshscope.cost.array_traffic import products
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.parse import parse_hlo

# 128 heads, each [1024, 128] x [128, 512].
HEADS, ROWS, WIDTH, RANK = 128, 1024, 128, 512
PRODUCTS = {
    "dot": (
        "dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
        ("bf16[128,1024,128]", "bf16[128,128,512]", "f32[128,1024,512]"),
    ),
    # Heads as a spatial dim with one valid position for each: of a program of tpu-inference 0.32.0 ...
    "dilated window": (
        "convolution(%l, %r), window={size=128 stride=127 lhs_dilate=128}, dim_labels=b0f_o0i->0bf",
        ("bf16[1024,128,128]", "bf16[512,128,128]", "f32[128,1024,512]"),
    ),
    # ... and of our own.
    "padded window": (
        "convolution(%l, %r), window={size=128 pad=127_127 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
        ("bf16[128,1024,128]", "bf16[128,128,512]", "f32[128,1024,512]"),
    ),
    # The heads of an output projection are summed: no batch.
    "contracted window": (
        "convolution(%l, %r), window={size=128}, dim_labels=b0f_0io->bf",
        ("bf16[1024,128,128]", "bf16[128,128,7168]", "f32[1024,7168]"),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_batched_product_has_the_flops_of_its_heads(name: str) -> None:
    """Each head counts once, whatever window it is written with."""
    product, (left, right, result) = PRODUCTS[name]
    entry = (
        f"  %l = {left} parameter(0)\n  %r = {right} parameter(1)\n  ROOT %p = {result} {product}"
    )
    module = parse_hlo(module_text(entry, header=""), "test.hlo")
    rank = 7168 if "7168" in result else RANK
    in_entry = products(Dataflow(module), module.entry, module.entry.root)
    assert sum(p.flops for p in in_entry) == 2 * HEADS * ROWS * WIDTH * rank
