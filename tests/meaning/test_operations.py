"""Operations that mix positions, examples or features mean what they mean without a mesh, outside and inside a
`Stack`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from placed import placed

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


def gradients(between, inside, stacked, degrees, microbatches):
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


def cases():
    """Every operation on two meshes, in a list of layers and in a `Stack`; by default one of them."""
    meshes = dict(gtp=4, tp=2), dict(dp=2, gtp=2, tp=2), dict(gtp=8), dict(tp=3)
    for number, name in enumerate((*OPERATIONS, *INSIDE)):
        for stacked in (False, True):
            mesh = meshes[(number + 2 * stacked) % len(meshes)]
            where = "inside a Stack" if stacked else "outside"
            axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
            marks = [] if stacked and number == 6 else pytest.mark.full
            yield pytest.param(name, stacked, mesh, id=f"{name}, {where}, {axes}", marks=marks)


@pytest.mark.filterwarnings("ignore:a weight of shape")
@pytest.mark.parametrize("name, stacked, mesh", list(cases()))
def test_an_operation_means_what_it_means_without_a_mesh(name, stacked, mesh, x64):
    between = OPERATIONS.get(name, lambda x: x)
    inside = INSIDE.get(name, jnp.tanh)
    found = gradients(between, inside, stacked, mesh, 1)
    assert_equal(found, gradients(between, inside, stacked, None, 1))
