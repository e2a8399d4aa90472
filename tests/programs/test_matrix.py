"""Products with quantized matrices equal those with dequantized ones, for one row and for several."""

import jax.numpy as jnp
import numpy as np
import pytest

from meshscope.programs.jax.matrix import Matrix

BLOCK = 4
SUBSCRIPTS = {
    "two dims": ("bsd,df->bsf", (16, 8), (1,)),
    "heads as outputs": ("bsd,dnh->bsnh", (16, 2, 4), (1, 2)),
    "heads as inputs": ("bsnh,nhd->bsd", (4, 4, 8), (2,)),
}


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("name", SUBSCRIPTS)
@pytest.mark.parametrize("form", ["blocks", "groups"])
def test_a_product_of_scaled_values_equals_that_of_the_whole_matrix(
    shape: tuple[int, int], name: str, form: str
) -> None:
    """Blocks of 4 x 4 values, or groups of 4 inputs with a scale for each output."""
    subscripts, dims, outputs = SUBSCRIPTS[name]
    is_square = form == "blocks"
    random = np.random.default_rng(0)
    n_inputs = int(np.prod(dims[: outputs[0]]))
    n_outputs = int(np.prod(dims[outputs[0] :]))
    values = random.integers(-8, 8, dims)
    scale = random.uniform(0.5, 2.0, (n_inputs // BLOCK, n_outputs)).astype(np.float32)
    wide = scale
    if is_square:
        scale = scale[:, ::BLOCK]
        wide = scale.repeat(BLOCK, axis=1)
    elif len(dims) == 3 and outputs[0] == 1:
        scale = scale.reshape(-1, *dims[1:])
    elif len(dims) == 3:
        scale = scale.reshape(dims[0], -1, n_outputs)
    dequantized = values * wide.repeat(BLOCK, axis=0).reshape(dims)
    x = random.normal(size=(*shape, *dims[: outputs[0]])).astype(np.float32)

    matrix = Matrix(
        values=jnp.asarray(values, jnp.int8),
        scale=jnp.asarray(scale),
        outputs=outputs,
        dtype=jnp.float32,
        block=BLOCK if is_square else None,
    )

    product = np.asarray(matrix.einsum(subscripts, jnp.asarray(x)))
    np.testing.assert_allclose(product, np.einsum(subscripts, x, dequantized), rtol=1e-5, atol=1e-4)
