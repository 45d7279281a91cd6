"""The tolerances of the kernels for experts in blocks of 128 follow from a tensor core that keeps 14 bits of a sum."""

import numpy as np
import pytest

from . import test_grouped_fp8_blocks_on_gpus as on_gpus
from .experts import groups_of

BITS, STEP, BLOCK = 14, 32, 128
pytestmark = pytest.mark.full


def cut(values, exponent):
    """Values cut toward zero to multiples of 2^(exponent - BITS)."""
    unit = np.exp2(exponent - BITS)
    return np.trunc(values / unit) * unit


def block_sums(left, right, *, promoted=True):
    """`left @ right.T`, where each sum is aligned with 32 products at a time; promoted every 128 elements."""
    total = np.zeros((len(left), len(right)))
    sums = np.zeros_like(total)
    for k in range(0, left.shape[1], STEP):
        if promoted and k % BLOCK == 0:
            total, sums = total + sums, np.zeros_like(sums)
        products = left[:, None, k : k + STEP] * right[None, :, k : k + STEP]
        largest = np.maximum(np.abs(products).max(-1), np.abs(sums))
        exponent = np.floor(np.log2(np.where(largest > 0, largest, 1))) + 1
        sums = cut(sums, exponent) + cut(products, exponent[..., None]).sum(-1)
    return total + sums


def error(left, right, **options):
    """The largest error, relative to the sum of magnitudes."""
    size = np.abs(left) @ np.abs(right).T
    return np.max(np.abs(block_sums(left, right, **options) - left @ right.T) / size)


def test_a_product_has_the_error_that_an_h100_had():
    sizes = on_gpus.EMPTY_TO_TWO_TILES
    _, kernels = on_gpus.in_tiles(on_gpus.numbers(len(sizes), 384, 256), 1)
    _, x = on_gpus.in_runs(on_gpus.numbers(sum(sizes) + 5, 256))
    mine = groups_of(sizes)[2]  # 127 tokens
    assert error(x[mine], kernels[2]) == pytest.approx(0.00023254576504562344, rel=1e-9)


def test_a_sum_over_rows_is_within_the_tolerance_but_not_within_that_of_one_size():
    (_, left), (_, right) = (on_gpus.in_columns(on_gpus.numbers(9 * BLOCK, size)) for size in (384, 256))
    assert on_gpus.ERROR_OF_ONE_SIZE < error(left[:, :BLOCK], right[:, :BLOCK]) < 0.6 * on_gpus.ERROR


def test_a_long_sum_of_one_size_needs_promotion():
    _, kernels = on_gpus.in_tiles(on_gpus.numbers(2, 256, 16384, one_sign=True), 1)
    _, x = on_gpus.in_runs(on_gpus.numbers(133, 16384, one_sign=True))
    left, right = x[:4], kernels[0][:8]
    assert error(left, right) < on_gpus.ERROR_OF_ONE_SIZE < 0.1 < error(left, right, promoted=False)
