"""The wire format of `examples/07_wire_of_your_own.py`, E4M3 with one scale per row: its rounding, on meshes.

`tests/weights/test_wires.py` trains models in formats like it.
"""

import importlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from placed import placed
from selection import pairwise

import gtp_jax as gtp

from .test_recipe_parity import scope

RowFP8 = importlib.import_module("examples.07_wire_of_your_own").RowFP8

WIDTH = 64


def by_rows(kernel):
    """A kernel `(..., in, out)` rounded as the format says, by numpy."""
    kernel = np.asarray(kernel, np.float32)
    scale = np.abs(kernel).max(-2, keepdims=True) / np.float32(448)
    return (kernel / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


# rows divided over gtp; over dp too, and over tp, which divides columns or rows; unevenly; columns over gtp and dp
PLACES = {
    "gtp 4": (dict(gtp=4), {}, 64),
    "gtp 2 x dp 2, column": (dict(gtp=2, dp=2, tp=2), dict(parallel="column"), 64),
    "gtp 2 x dp 2, row": (dict(gtp=2, dp=2, tp=2), dict(parallel="row"), 64),
    "gtp 2 x tp 3, uneven": (dict(gtp=2, tp=3), dict(parallel="column"), 64),
    "gtp 4 x dp 2, columns": (dict(gtp=4, dp=2), {}, 7),
}


@pytest.mark.parametrize("place, several", pairwise(PLACES, [True, False], usual=3))
def test_a_gathered_weight_is_near_its_master(place, several):
    degrees, options, out = PLACES[place]
    sizes = {"a": out, "b": 2 * out} if several else out
    rng = np.random.default_rng(0)

    def init(key, shape, dtype):
        spread = rng.normal(size=shape) * np.geomspace(1e-3, 1e3, shape[1])  # rows of unequal magnitude
        spread[:, 3] = 0
        return jnp.asarray(spread, dtype)

    with scope(degrees):
        layer = placed(lambda rngs: gtp.Dense(WIDTH, sizes, dtype="float32", kernel_init=init, rngs=rngs, **options))
        masters = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer))["kernel"])
        with gtp.use_recipe(RowFP8()):
            x = jnp.repeat(jnp.eye(WIDTH)[:, None], 6, axis=1)  # a sequence that tp divides
            found = jax.jit(lambda x: layer(x))(x)
    masters, found = (jax.tree.leaves(tree) for tree in (masters, found))
    for master, weight in zip(masters, found, strict=True):
        weight = np.asarray(weight)[:, 0]
        largest = np.abs(master).max(0)
        assert np.all(np.abs(weight - master) <= 2**-4 * largest)
        assert np.mean(weight != master) > 0.5
        rounded = by_rows(np.where(largest, master, 1)) * (largest > 0)
        # but for scales' last bits, and quotients that these put on the other side of a tie
        assert np.mean(~np.isclose(weight, rounded, rtol=1e-6, atol=0)) < 0.01
