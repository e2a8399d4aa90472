"""Numbers in mxfp4: codes of e2m1 in int4 arrays, and scales as exponents in uint8 arrays.

XLA has no array of this type on a TPU. Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3.3
(elements) and 5.4.1 (scales).
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from meshscope.programs.jax.numerics import Array

EXPONENT_BIAS = 127  # of e8m0
FP8_FACTOR = 2.0**14  # e5m2 has a bias of 15, e2m1 one of 1
LARGEST_EXPONENT = 2  # of e2m1, whose largest number is 6


def decoded(codes: Array) -> Array:
    """The float32 values of int4 `codes`: a sign bit, then 0, 0.5, 1, 1.5, 2, 3, 4 or 6."""
    signed = codes.astype(jnp.float32)
    is_negative = signed < 0
    m = jnp.where(is_negative, signed + 8, signed)
    magnitude = jnp.maximum(jnp.maximum(m * 0.5, m - 2), m * 2 - 8)
    return jnp.where(is_negative, -magnitude, magnitude)


def decoded_in_vmem(codes: Array) -> Array:
    """As `decoded`, in a kernel: values of e5m2, of which `FP8_FACTOR` times are those of int4 `codes`.

    Both types have the same bits but for the place of the sign and the bias of exponents.
    """
    words = pltpu.bitcast(codes.astype(jnp.int8), jnp.uint32)
    magnitude = (words & jnp.uint32(0x07070707)) << 1
    return pltpu.bitcast(magnitude | (words & jnp.uint32(0x80808080)), jnp.float8_e5m2)


def wide_scales(stored: Array) -> Array:
    """Scales in float32: powers of two for uint8 exponents, of which 0 gives 0 and 255 infinity."""
    if stored.dtype != jnp.uint8:
        return stored.astype(jnp.float32)
    return lax.bitcast_convert_type(stored.astype(jnp.int32) << 23, jnp.float32)


def shared_exponents(maxima: np.ndarray) -> np.ndarray:
    """The stored exponents, as uint8, of groups whose largest magnitudes are `maxima`.

    The largest number becomes one with the largest exponent of e2m1 (section 6.3), so it may round to 6.
    """
    exponents = np.frexp(maxima)[1] - 1 - LARGEST_EXPONENT + EXPONENT_BIAS
    return np.where(maxima == 0, EXPONENT_BIAS, np.clip(exponents, 1, 254)).astype(np.uint8)


def encoded(values: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """The int4 codes of `values` over two to the power of `exponents`, rounded to nearest even."""
    scaled = np.ldexp(values.astype(np.float32), EXPONENT_BIAS - exponents.astype(np.int32))
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.int8)
    return np.where(codes > 7, codes - 16, codes).astype(ml_dtypes.int4)
