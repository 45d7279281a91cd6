"""Comparison bit for bit, and every pattern of the short dtypes."""

import jax
import numpy as np

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# Values at the edges of float32 for the amax of a tensor: ordinary, subnormal, smallest, largest, near overflow.
AMAXES = np.array([6.0, 600.0, 1e-3, 3.0, 1e-38, 1e-40, 2.0**-149, 1e38, np.finfo(np.float32).max, 0.0], np.float32)


def bits_of(array) -> np.ndarray:
    """The patterns of an array's elements."""
    array = np.ascontiguousarray(array)
    return array.view(_WORDS[array.dtype.itemsize])


def assert_same_bits(actual, expected, what: str = "") -> None:
    """Equality of dtype, shape and every bit, with the first coordinate that differs.

    NaN equals NaN only with the same bits.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} instead of {expected.shape}"
    got, wanted = bits_of(actual), bits_of(expected)
    wrong = np.argwhere(got != wanted)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.size} differ, first at {at}: "
            f"{got[at]:#x} ({actual[at]}) instead of {wanted[at]:#x} ({expected[at]})"
        )


def every_pattern(dtype) -> np.ndarray:
    """All 65,536 values of a 16-bit dtype."""
    return np.arange(65536, dtype=np.uint32).astype(np.uint16).view(dtype)


def every_bfloat16_as_float32() -> np.ndarray:
    """All 65,536 bfloat16 values; NaNs keep their patterns."""
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def device(array: np.ndarray) -> jax.Array:
    """A jax array with the same bits, copied by no program, as `jnp.asarray` would compile one for each shape."""
    return jax.device_put(array)
