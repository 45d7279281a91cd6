"""Gradients of arrays that every block takes, such as an encoder's output and a learned bias, in bfloat16.

The oracle is one device that rounds nothing: the gradient of each block is a power of two, and their sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp

WIDTH = 16
BATCH = np.eye(WIDTH, dtype=np.float32)  # an example for each feature, so that no sum over examples rounds
# What each block multiplies by. From either end, a sum of these in bfloat16 passes 256 midway and then loses each 1,
# which is half of its spacing.
FACTORS = [1.0] * 8 + [256.0] + [1.0] * 8
KERNELS = np.asarray([factor * np.eye(WIDTH) for factor in FACTORS], np.float32)


class Block(nnx.Module):
    def __init__(self, own: bool, dtype: Any, rngs: nnx.Rngs):
        dense = gtp.Dense if own else nnx.Linear
        self.dense = dense(WIDTH, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x, memory, bias):
        return x + self.dense(memory + bias)


class Model(nnx.Module):
    """Blocks of gtp_jax's own layers in a `Stack`, or of stock layers in a list."""

    def __init__(self, own: bool, dtype: Any, rngs: nnx.Rngs, **options: Any):
        self.encoder, self.bias = nnx.Param(jnp.ones(WIDTH)), nnx.Param(jnp.ones(WIDTH))
        self.dtype = dtype
        if own:
            self.blocks = gtp.Stack(lambda rngs: Block(own, dtype, rngs), len(FACTORS), rngs=rngs, **options)
        else:
            self.blocks = nnx.List([Block(own, dtype, rngs) for _ in FACTORS])

    def __call__(self, x):
        x = x.astype(self.dtype)
        memory, bias = x * self.encoder[...].astype(self.dtype), self.bias[...].astype(self.dtype)
        if isinstance(self.blocks, gtp.Stack):
            return self.blocks(x, memory, bias)
        for block in self.blocks:
            x = block(x, memory, bias)
        return x


def stack(unroll: Any) -> Model:
    schedule = gtp.nn.Schedule(unroll=unroll)
    model = gtp.nn.abstract_model(lambda rngs: Model(True, jnp.bfloat16, rngs, schedule=schedule))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        like = variable.get_raw_value()
        values = KERNELS if "kernel" in path else np.ones(like.shape, like.dtype)
        variable.set_raw_value(jax.device_put(values, like.sharding))
    return model


def stock(dtype: Any) -> Model:
    model = nnx.eval_shape(lambda: Model(False, dtype, nnx.Rngs(0)))
    for block, kernel in zip(model.blocks, KERNELS, strict=True):
        block.dense.kernel.set_value(jax.device_put(kernel))
    for variable in (model.encoder, model.bias):
        variable.set_value(jax.device_put(np.ones(WIDTH, np.float32)))
    return gtp.shard(model, "blocks.*", min_size=64)


def gradients(make: Callable[[], Model], degrees: dict[str, int], view: Any) -> list[np.ndarray]:
    """Returns, for the encoder and the bias, the sums of the gradients of all blocks."""
    loss = lambda model, x: (model(x).astype(jnp.float32).sum(), jnp.float32(x.shape[0]))  # noqa: E731
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        state = gtp.TrainState.create(make(), optax.identity())
        found = jax.jit(lambda state, x: gtp.train.loss_and_gradients(loss, state, x, view=view)[1])(state, BATCH)
    return [WIDTH * np.asarray(found["encoder"]), np.asarray(found["bias"])]  # one example, and the mean of all


WANTED = np.full(WIDTH, sum(FACTORS))
CASES = [
    (dict(gtp=8), "global", "full"),
    (dict(dp=2, gtp=4), "local", 1),
    (dict(dp=2, gtp=4), "global", 1),
    (dict(gtp=8), "local", "full"),
]


@pytest.mark.parametrize(("degrees", "view", "unroll"), others_full(CASES, CASES[:2]))
def test_a_stack_sums_gradients_of_shared_inputs_in_float32(degrees, view, unroll):
    for found in gradients(lambda: stack(unroll), degrees, view):
        np.testing.assert_array_equal(found, WANTED)


@pytest.mark.parametrize(
    ("degrees", "view"), others_full([case[:2] for case in CASES], [case[:2] for case in CASES[:2]])
)
def test_stock_blocks_sum_gradients_of_shared_inputs_in_float32(degrees, view):
    for found in gradients(lambda: stock(jnp.bfloat16), degrees, view):
        np.testing.assert_array_equal(found, WANTED)
