"""The amax of many arrays: exact, over finite values, of any size and dtype."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gtp_jax as gtp

from . import oracle
from .bits import assert_same_bits, device, every_pattern


def test_many_arrays_of_mixed_sizes_and_dtypes(implementation):
    random = np.random.default_rng(0)
    dtypes = [np.float32, ml_dtypes.bfloat16, np.float16]
    arrays = [random.normal(size=size).astype(dtypes[i % 3]) for i, size in enumerate([1, 7, 64, 1000, 3, 0, 129] * 20)]
    arrays += [random.integers(0, 2**32, 64, dtype=np.uint32).view(np.float32) for _ in range(30)]  # any patterns
    got = gtp.ops.multi_amax([device(x) for x in arrays], implementation=implementation)
    assert_same_bits(got, np.array([oracle.amax(x) for x in arrays], np.float32))
    assert gtp.ops.multi_amax([], implementation=implementation).shape == (0,)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_every_pattern_alone(dtype, implementation):
    patterns = every_pattern(dtype)
    got = jax.vmap(lambda x: gtp.ops.multi_amax([x], implementation=implementation)[0])(device(patterns.reshape(-1, 1)))
    wide = np.abs(patterns.astype(np.float32))
    assert_same_bits(got, np.where(np.isfinite(wide), wide, np.float32(0)))


def test_values_that_are_not_finite_are_left_out(implementation):
    arrays = [[np.nan, 2.0], [np.inf, -3.0], [np.nan], [-np.inf, np.nan], [-0.0], [2.0**-149, np.nan]]
    got = gtp.ops.multi_amax([jnp.array(x, jnp.float32) for x in arrays], implementation=implementation)
    assert_same_bits(got, np.array([2, 3, 0, 0, 0, 2.0**-149], np.float32))


def test_each_index_of_a_stack_has_its_own(implementation):
    random = np.random.default_rng(0)
    arrays = [
        (random.normal(size=(3, 7, 33)) * np.array([1, 100, 0.01])[:, None, None]).astype(np.float32),
        random.normal(size=(2, 1000)).astype(ml_dtypes.bfloat16),
        np.zeros((1, 0), np.float32),
        random.normal(size=(4,)).astype(np.float16),
    ]
    found = gtp.ops.multi_amax([device(x) for x in arrays], stacked=True, implementation=implementation)
    assert_same_bits(found, np.array([oracle.amax(part) for x in arrays for part in x], np.float32))
    assert gtp.ops.multi_amax([], stacked=True, implementation=implementation).shape == (0,)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["f32", "bf16", "f16"])
def test_more_parts_than_one_launch_takes_at_addresses_aligned_to_an_element(dtype, implementation):
    # one launch takes 145 or 1,096 of them; parts of an odd size begin anywhere, and those of the second stack are
    # longer than what one block of threads takes
    random = np.random.default_rng(1)
    arrays = [random.normal(size=shape).astype(dtype) for shape in ((2300, 33), (3, 20001), (150, 7))]
    arrays[1][1, 20000] = 77.0
    found = gtp.ops.multi_amax([device(x) for x in arrays], stacked=True, implementation=implementation)
    assert_same_bits(found, np.concatenate([np.abs(x).max(1) for x in arrays]).astype(np.float32))
    few = gtp.ops.multi_amax([device(arrays[2])], stacked=True, implementation=implementation)
    assert_same_bits(few, found[-150:])
