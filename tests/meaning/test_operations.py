"""Operations that mix positions, examples or features mean what they mean without a mesh, outside and inside a
`Stack`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from placed import placed
from selection import pairwise

import gtp_jax as gtp

from .operations import INSIDE, LENGTH, OPERATIONS
from .test_models_on_meshes import assert_equal, scope

BATCH, WIDTH = 24, 12
DTYPES = dict(dtype="float64", param_dtype="float64")


class Block(nnx.Module):
    def __init__(self, between, inside, rngs):
        self.between, self.inside = between, inside
        self.up = gtp.Dense(WIDTH, 24, parallel="column", use_bias=True, rngs=rngs, **DTYPES)
        self.down = gtp.Dense(24, WIDTH, parallel="row", rngs=rngs, **DTYPES)
        self.plain = nnx.Linear(WIDTH, WIDTH, rngs=rngs, dtype=jnp.float64, param_dtype=jnp.float64)
        init = nnx.initializers.normal(1.0)
        if not jax.sharding.get_abstract_mesh().empty:  # Flax wants a mesh for it
            init = nnx.with_partitioning(init, (None, "tp"))
        self.parted = nnx.Param(init(rngs.params(), (WIDTH, WIDTH), jnp.float64))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, dtype=jnp.float64, param_dtype=jnp.float64)

    def __call__(self, x):
        x = self.between(self.norm(x)) @ self.parted[...]
        return x + self.down(self.inside(self.up(self.plain(x))))


class Model(nnx.Module):
    def __init__(self, between, inside, stacked, rngs):
        make = lambda rngs: Block(between, inside, rngs)  # noqa: E731
        self.blocks = gtp.Stack(make, 2, rngs=rngs) if stacked else nnx.List([make(rngs), make(rngs)])

    def __call__(self, x):
        if isinstance(self.blocks, gtp.Stack):
            return self.blocks(x)
        for block in self.blocks:
            x = block(x)
        return x


def gradients(between, inside, stacked, degrees):
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH))
    with scope(degrees):
        model = placed(lambda rngs: Model(between, inside, stacked, rngs))
        graph, params = nnx.split(model)

        @jax.jit
        def run(params, x):
            return jax.value_and_grad(lambda p, x: jnp.mean(jnp.sin(nnx.merge(graph, p)(x))), argnums=(0, 1))(params, x)

        loss, (found, to_x) = run(params, jnp.asarray(x))
        found = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(found)}
        return np.asarray(loss), found, np.asarray(to_x)


NAMES = ["statistics over the batch", *(name for name in (*OPERATIONS, *INSIDE) if name != "statistics over the batch")]
ON = {"gtp 4 x tp 2": dict(gtp=4, tp=2), "dp 2 x gtp 2 x tp 2": dict(dp=2, gtp=2, tp=2), "tp 3": dict(tp=3)}
WHERE = {"inside a Stack": True, "outside": False}


@pytest.mark.filterwarnings("ignore:a weight of shape")
@pytest.mark.parametrize("name, where, mesh", pairwise(NAMES, WHERE, ON, usual=2))
def test_an_operation_means_what_it_means_without_a_mesh(name, where, mesh, x64):
    between = OPERATIONS.get(name, lambda x: x)
    inside = INSIDE.get(name, jnp.tanh)
    found, wanted = (gradients(between, inside, WHERE[where], degrees) for degrees in (ON[mesh], None))
    assert_equal(found, wanted)
