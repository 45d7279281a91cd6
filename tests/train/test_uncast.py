"""Gradients that were summed in 16 bits stay in 16 bits until the optimizer reads them, and no value changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from placed import placed
from selection import pairwise

import gtp_jax as gtp
from gtp_jax.train._uncast import uncast

NARROW = dict(grad_reduce="bf16")


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def gradient_of(product):
    """The first output of `uncast` for the gradient of a sum, and the same gradient as JAX returns it."""
    w, x = normal(4, 3), normal(2, 4)
    gradient = jax.grad(lambda w: jnp.sum(product(w, x)))
    return jax.jit(lambda w: (uncast(lambda w: (gradient(w), ()))(w)[0], gradient(w)))(w)


def in_bf16(w, x):
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


CASES = {
    "cast once": (in_bf16, jnp.bfloat16),
    "not cast": (lambda w, x: x @ w, jnp.float32),
    "used twice": (lambda w, x: in_bf16(w, x) + in_bf16(w, 2 * x), jnp.float32),
    "with a penalty of its own": (lambda w, x: jnp.sum(in_bf16(w, x)) + 0.1 * jnp.sum(w * w), jnp.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_only_a_cast_that_comes_last_is_left_out_and_casting_again_gives_the_same_bits(case):
    product, dtype = CASES[case]
    found, wanted = gradient_of(product)
    assert found.dtype == dtype and wanted.dtype == jnp.float32
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted)


def test_a_cast_before_a_constraint_or_within_a_shard_map_is_left_out_and_the_bits_are_the_same():
    w, x = normal(8, 4), normal(2, 8)
    rows = PartitionSpec("gtp")

    def placed(w):
        g = jax.lax.with_sharding_constraint(jax.grad(lambda w: jnp.sum(in_bf16(w, x)))(w), rows)
        return {"constraint": g, "two": jax.lax.with_sharding_constraint(g, rows), "added": g + w}, jnp.sum(g)

    def mapped(w):
        own = jax.shard_map(lambda w: (w.astype(jnp.bfloat16) * 2).astype(jnp.float32), in_specs=rows, out_specs=rows)
        shared = own(w)
        return {"last": own(w), "shared": shared, "read": own(w) + w}, shared

    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        w = jax.device_put(w, rows)
        for function, narrow in ((placed, ["constraint", "two"]), (mapped, ["last"])):
            wanted, found = jax.jit(function)(w)[0], jax.jit(uncast(function))(w)[0]
            for name in wanted:
                mine, own = found[name], wanted[name]
                assert mine.dtype == (jnp.bfloat16 if name in narrow else jnp.float32), name
                assert mine.sharding.is_equivalent_to(own.sharding, 2)
                np.testing.assert_array_equal(mine.astype(jnp.float32), own)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = gtp.Dense(8, 16, rngs=rngs, **NARROW)
        self.down = gtp.Dense(16, 8, rngs=rngs, **NARROW)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


def loss(model, batch):
    y = model(batch)
    return jnp.sum(y.astype(jnp.float32) ** 2), jnp.float32(batch.shape[0])


def step_of(degrees, **options):
    """A mesh, and a step with its state and batch."""
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    with jax.set_mesh(mesh):
        model = placed(lambda rngs: gtp.Stack(Block, 3, rngs=rngs))
        optimizer = optax.adamw(1e-2)
        state = gtp.TrainState.create(model, optimizer)
        step = gtp.train_step(loss, optimizer, **options)
    return mesh, step, state, normal(8, 4, 8).astype(jnp.bfloat16)


def branch_dtypes(degrees, **options):
    """The dtypes of the arrays of three dimensions that enter the branch with the optimizer: state, and gradients."""
    mesh, step, state, batch = step_of(degrees, **options)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(step)(state, batch).jaxpr

    def conds(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "cond":
                yield eqn
            for value in jax.tree.leaves(list(eqn.params.values())):
                inner = getattr(value, "jaxpr", value)
                yield from conds(inner) if hasattr(inner, "eqns") else ()

    (eqn,) = conds(jaxpr)
    return sorted(str(v.aval.dtype) for v in eqn.invars if v.aval.ndim == 3)


NARROW_GRADIENTS = {
    "one rank": (dict(gtp=1), 1, 2),
    "gtp 2": (dict(gtp=2), 1, 2),
    "two microbatches": (dict(gtp=2), 2, 0),
}


@pytest.mark.parametrize("case, view", pairwise(NARROW_GRADIENTS, ["global", "local"], usual=3))
def test_gradients_of_one_microbatch_enter_the_optimizers_branch_in_16_bits(case, view):
    degrees, microbatches, narrow = NARROW_GRADIENTS[case]
    # two kernels with two moments each, and two gradients
    dtypes = branch_dtypes(degrees, view=view, microbatches=microbatches)
    assert dtypes == ["bfloat16"] * narrow + ["float32"] * (8 - narrow)


def test_a_sum_over_replicas_in_32_bits_is_kept_in_global_view():
    with gtp.mesh.use_roles(
        gtp.mesh.Roles(optimizer=())
    ):  # dp 2 holds replicas, whose gradients are added after the cast
        assert branch_dtypes(dict(dp=2, gtp=2), view="global") == ["float32"] * 8
