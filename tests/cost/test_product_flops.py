"""FLOPs of matrix products, in the forms that the compiler writes them."""

import pytest

from meshscope.cost.array_traffic import products
from meshscope.readers.hlo.dataflow import Dataflow
from meshscope.readers.hlo.parse import parse_hlo

# 128 heads, each [1024, 128] x [128, 512].
HEADS, ROWS, WIDTH, RANK = 128, 1024, 128, 512
PRODUCTS = {
    "dot": (
        (
            "f32[128,1024,512] dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={1}"
        ),
        ("bf16[128,1024,128]", "bf16[128,128,512]"),
    ),
    # Heads as a spatial dim with one valid position for each: of a program of tpu-inference 0.32.0 ...
    "dilated window": (
        (
            "f32[128,1024,512] convolution(%l, %r), "
            "window={size=128 stride=127 lhs_dilate=128}, dim_labels=b0f_o0i->0bf"
        ),
        ("bf16[1024,128,128]", "bf16[512,128,128]"),
    ),
    # ... and of our own.
    "padded window": (
        (
            "f32[128,1024,512] convolution(%l, %r), "
            "window={size=128 pad=127_127 rhs_reversal=1}, dim_labels=0bf_0io->0bf"
        ),
        ("bf16[128,1024,128]", "bf16[128,128,512]"),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_batched_product_has_the_flops_of_its_heads(name: str) -> None:
    """Each head counts once, whatever window it is written with."""
    product, (left, right) = PRODUCTS[name]
    text = f"""\
HloModule m, is_scheduled=true

ENTRY %main (l: {left}, r: {right}) -> f32[128,1024,512] {{
  %l = {left} parameter(0)
  %r = {right} parameter(1)
  ROOT %product = {product}
}}
"""
    module = parse_hlo(text, "test.hlo")
    (main,) = module.computations.values()
    *_, last = main.instructions
    assert (
        sum(p.flops for p in products(Dataflow(module), main, last))
        == 2 * HEADS * ROWS * WIDTH * RANK
    )


def test_a_window_without_batch_is_contracted() -> None:
    """The heads of an output projection are summed."""
    text = """\
HloModule m, is_scheduled=true

ENTRY %main (l: bf16[1024,128,128], r: bf16[128,128,7168]) -> f32[1024,7168] {
  %l = bf16[1024,128,128] parameter(0)
  %r = bf16[128,128,7168] parameter(1)
  ROOT %product = f32[1024,7168] convolution(%l, %r), window={size=128}, dim_labels=b0f_0io->bf
}
"""
    module = parse_hlo(text, "test.hlo")
    (main,) = module.computations.values()
    *_, last = main.instructions
    assert (
        sum(p.flops for p in products(Dataflow(module), main, last)) == 2 * 1024 * 128 * 128 * 7168
    )
