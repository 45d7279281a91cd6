"""`FP8(matmuls=True, keep_codes=True)`: codes of inputs are saved for wgrad instead of the inputs, and nothing else
changes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from messages import naming
from placed import placed
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.chain import REMAT
from gtp_jax.collectives import gather_linear_fp8, join_parts, linear_scatter_fp8, split_parts
from gtp_jax.formats import FP8_E5M2
from gtp_jax.nn import abstract_model
from gtp_jax.ops import Fp8Products, linear_fp8

BY_REMAT = gtp.FP8(matmuls=True)
WITHOUT, KEPT = (gtp.FP8(matmuls=True, keep_codes=keep_codes) for keep_codes in (False, True))
ROWS, INTO, OUT = 16, 24, 40


def gathered(x, w, keep_codes):
    return join_parts(gather_linear_fp8(x, w, Fp8Products(FP8_E5M2, keep_codes), "tp"), "tp")


def scattered(x, w, keep_codes):
    return linear_scatter_fp8(split_parts(x, "tp"), w, Fp8Products(FP8_E5M2, keep_codes), "tp")


def alone(x, w, **options):
    return linear_fp8(x, w, FP8_E5M2, **options)


# Each product, and the partitions of its input, weight and output over tp.
CUT, FEATURES = P(None, "tp"), P(None, None, "tp")
PRODUCTS = {
    "alone": (alone, P(), P(), P()),
    "gathered": (gathered, CUT, P("tp"), FEATURES),
    "scattered": (scattered, FEATURES, P(None, "tp"), CUT),
}


def mapped(product, **options):
    function, *into, out = PRODUCTS[product]
    call = lambda x, w: function(x, w, **options)  # noqa: E731
    if product == "alone":
        return call
    mesh = jax.sharding.get_mesh()
    return jax.shard_map(call, mesh=mesh, in_specs=tuple(into), out_specs=out, check_vma=False)


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    with jax.set_mesh(gtp.make_mesh(gtp=1, tp=2, devices=jax.devices()[:2])):
        yield tuple(jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((2, ROWS, INTO), (OUT, INTO)))


@pytest.mark.parametrize("product, dtype", pairwise(PRODUCTS, ["bfloat16", "float32"]))
def test_products_and_gradients_are_the_same_bit_for_bit(product, dtype, operands):
    x, w = (jnp.asarray(np.asarray(a), dtype) for a in operands)

    def found(**options):
        call = jax.jit(mapped(product, **options))

        @jax.jit
        def run(x, w):
            y, back = jax.vjp(call, x, w)
            return y, *back(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(dtype))

        return run(x, w)

    for one, other in zip(found(keep_codes=True), found(keep_codes=False), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
        assert one.dtype == other.dtype and np.asarray(one, np.float32).any()


@pytest.mark.parametrize("product", PRODUCTS)
def test_backward_keeps_codes_or_the_input_and_not_both(product, operands):
    x, w = operands
    for keep_codes, wanted in ((False, (x.size, w.size)), (True, (0, x.size + w.size))):
        call = jax.jit(mapped(product, keep_codes=keep_codes))
        saved = jax.eval_shape(lambda x, w: jax.vjp(call, x, w)[1], x, w)  # noqa: B023
        sizes = [(leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(saved)]
        assert tuple(sum(n for d, n in sizes if d == dtype) for dtype in ("bfloat16", "uint8")) == wanted


def test_a_second_derivative_and_forward_mode_are_refused(operands):
    x, w = operands
    call = mapped("alone", keep_codes=True)
    first = jax.grad(lambda x: jnp.sum(jnp.square(call(x, w).astype(jnp.float32))))
    with pytest.raises(TypeError, match=naming("differentiated again")):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(first(x).astype(jnp.float32))), x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(lambda x: call(x, w), (x,), (x,))).lower(x)


def test_examples_of_a_vmap_are_scaled_each_by_its_own_amax(operands):
    x, w = operands
    x = x * jnp.array([1, 9], x.dtype)[:, None, None]

    def gradients(**options):
        one = jax.grad(lambda x, w: jnp.sum(jnp.sin(alone(x, w, **options))), (0, 1))
        return jax.jit(jax.vmap(one, (0, None)))(x, w)

    for one, other in zip(gradients(keep_codes=True), gradients(keep_codes=False), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def loss(model, x):
    return jnp.sum(jnp.sin(model(x)).astype(jnp.float32)), jnp.float32(x.size)


def trained(recipe, degrees, remat):
    """The loss and the gradients of a stack whose products are parallel by column and by row."""
    x = np.random.default_rng(1).normal(size=(8, 16, 64)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])):
        model = placed(factory)
        model.remat = remat
        state = gtp.TrainState.create(model, optax.identity())
        run = jax.jit(lambda s: gtp.train.loss_and_gradients(loss, s, x, recipe=recipe, view="local"))
        return jax.tree.map(np.asarray, run(state))


def factory(rngs):
    return gtp.Stack(lambda rngs: gtp.MLP(64, 128, rngs=rngs), 2, rngs=rngs)


MODELS = [(dict(gtp=2, tp=2), "matmuls"), (dict(gtp=1), "matmuls"), *((dict(gtp=2), remat) for remat in REMAT)]


@pytest.mark.full
@pytest.mark.parametrize("degrees, remat", MODELS, ids=str)
def test_a_model_s_loss_and_gradients_are_the_same_bit_for_bit(degrees, remat):
    found, wanted = (trained(recipe, degrees, remat) for recipe in (KEPT, WITHOUT))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found))


def test_frozen_weights_have_no_wgrad_and_keep_no_codes():
    def program(recipe):
        make = lambda rngs: gtp.nn.lora(factory(rngs), 4, 8.0, recipe=recipe, rngs=rngs)  # noqa: E731
        with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
            state = gtp.TrainState.create(abstract_model(make), optax.identity())
            run = jax.jit(lambda s, x: gtp.train.loss_and_gradients(loss, s, x, view="local"))
            return run.lower(state, jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)).as_text()

    assert program(KEPT) == program(WITHOUT)


# Without a policy, and under these, codes stay on the device.
KEEPING = (None, "matmuls", "activations", "everything")


@pytest.mark.parametrize("remat", others_full([None, *REMAT], [None, "matmuls", "nothing"]))
def test_by_default_codes_are_kept_where_the_policy_saves_them(remat):
    def program(recipe):
        with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
            model: Any = abstract_model(lambda rngs: factory(rngs) if remat else gtp.MLP(64, 128, rngs=rngs))
            if remat:
                model.remat = remat
            state = gtp.TrainState.create(model, optax.identity())
            run = jax.jit(lambda s, x: gtp.train.loss_and_gradients(loss, s, x, recipe=recipe, view="local"))
            return run.lower(state, jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)).as_text()

    kept, without = program(KEPT), program(WITHOUT)
    assert kept != without
    assert program(BY_REMAT) == (kept if remat in KEEPING else without)


def test_it_requires_matmuls():
    with pytest.raises(ValueError, match=naming("`keep_codes` `matmuls=True`")):
        gtp.FP8(keep_codes=True)
    with pytest.raises(TypeError, match=naming("`keep_codes` 1 True False None")):
        gtp.FP8(matmuls=True, keep_codes=1)  # pyright: ignore[reportArgumentType]
