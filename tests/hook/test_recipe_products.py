"""Recipes for models of stock layers: matmuls with sharded weights are those of quantized operands."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from placed import placed
from selection import others_full

import gtp_jax as gtp

from ..ops.test_linear_blocks import rounded
from .recipes import ALL_MESHES, BATCH, FP8, MATMULS, WIDTH, Dense, flat
from .steps import MESHES, scope


def test_an_outer_product_with_a_weight_is_not_rounded_to_fp8():
    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return jnp.tensordot(x, self.linear.kernel[...], 0), self.linear.kernel[...]

    x = drawn(8)
    with scope(MESHES["gtp 8"]), gtp.use_recipe(gtp.FP8(matmuls=True)):
        model = gtp.shard(nnx.jit(lambda: nnx.Sequential(Outer(nnx.Rngs(0))))(), Outer, min_size=64)
        found, values = nnx.jit(lambda model, x: model(x))(model, x)
    np.testing.assert_allclose(found, np.asarray(x)[:, None, None] * np.asarray(values), rtol=1e-6)


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


class Turned(nnx.Module):
    """Multiplies by its weight transposed, by `einsum`, and beneath a jit of its own."""

    def __init__(self, kernel):
        self.kernel = nnx.Param(kernel.T)

    def __call__(self, x):
        return jax.jit(lambda x, w: jnp.einsum("oi,b...i->b...o", w, x))(x, self.kernel[...])


CASES = [
    ("FP8", "linear", "gtp 8"),
    ("NVFP4", "turned", "gtp 8"),
    ("MXFP8", "linear", "gtp 4, tp 2"),
    ("FP8Blocks", "linear", "dp 2, gtp 4"),  # tp 2 would cut tiles
    ("FP8", "turned", "gtp 4, tp 2"),
    ("NVFP4", "linear", "dp 2, gtp 4"),
    ("FP8Blocks", "turned", "gtp 8"),
]


@pytest.mark.parametrize("name, way, mesh", others_full(CASES, CASES[1:2]))
def test_matmuls_are_those_of_gtp_jax_own_layers(name, way, mesh):
    recipe, tp = MATMULS[name], "tp" in mesh
    sizes = dict(hidden=192 if tp else 160, tp=tp)  # 20 features of each of 8 ranks are no whole blocks
    x = drawn(BATCH, 4, 64)

    def loss(model, x):
        return jnp.sin(3 * model(x)).mean()

    value_and_grad = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))
    with scope(ALL_MESHES[mesh]):
        model = nnx.jit(lambda: Dense(nnx.Rngs(0), own=False, **sizes))()
        with gtp.use_recipe(recipe):
            own = placed(lambda rngs: Dense(rngs, own=True, **sizes))
            wanted = value_and_grad(own, x)
            for block, other in zip(model.blocks, own.blocks, strict=True):
                block.kernel.set_value(jnp.asarray(np.asarray(other.kernel.get_value())))
            if way == "turned":
                model.blocks = nnx.List([Turned(block.kernel.get_value()) for block in model.blocks])
            model = gtp.shard(model, "blocks.*", min_size=64)
            found = value_and_grad(model, x)
            assert all(call.multiplied for call in gtp.explain(model, recipe, call=lambda model: model(x)).calls)
        with gtp.use_recipe(None if name == "FP8Blocks" else type(recipe)()):
            unrounded = value_and_grad(model, x)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    np.testing.assert_allclose(found[1][1], wanted[1][1], rtol=0, atol=1e-5 * np.abs(wanted[1][1]).max())
    one, other, third = (list(flat(g[1][0]).values()) for g in (found, wanted, unrounded))
    for a, b, c in zip(one, other, third, strict=True):
        a, c = (a.T, c.T) if way == "turned" else (a, c)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
        assert np.abs(c - b).max() > 1e-2 * np.abs(b).max()


class Named(nnx.Module):
    """A layer of gtp_jax's own, whose weight has the path that a stock layer's has."""

    def __init__(self, *sizes, **options):
        self.kernel = gtp.Dense(*sizes, **options)

    def __call__(self, x):
        return self.kernel(x)


class Rounding(nnx.Module):
    """Two blocks, and with `twice` another call of the first, which has keys of its own."""

    def __init__(self, rngs, own, tp=False, twice=True):
        self.twice = twice
        init = lambda _, shape, dtype: jax.random.normal(jax.random.key(shape[0]), shape, dtype) / 8  # noqa: E731
        self.blocks = nnx.List([])
        for sizes, names in (((64, 128), (None, "tp")), ((128, 64), ("tp", None))):
            common = dict(use_bias=False, dtype=jnp.float32, rngs=rngs)
            if own:
                parallel = dict(parallel="row" if names[0] else "column") if tp else {}
                self.blocks.append(Named(*sizes, kernel_init=init, **parallel, **common))
            else:
                own_init = nnx.with_partitioning(init, names) if tp else init
                self.blocks.append(nnx.Linear(*sizes, kernel_init=own_init, **common))
        if not own:
            gtp.shard(self, "blocks.*", min_size=64)

    def __call__(self, x):
        up, down = self.blocks
        x = jnp.tanh(down(jnp.tanh(up(x))))
        return jnp.tanh(up(x)) if self.twice else x


def rounded_gradients(mesh, own, recipe, seed=0, steps=(0,), **options):
    """Gradients in each of these steps, by one program."""

    def loss(model, x):
        return jnp.sin(3 * model(x)).sum(), jnp.float32(x.size)

    with scope(ALL_MESHES[mesh]):
        state = gtp.TrainState.create(
            gtp.init(lambda rngs: Rounding(rngs, own, "tp" in mesh, twice="view" not in options), nnx.Rngs(0)),
            optax.sgd(1.0),
        )
        run = jax.jit(lambda *given: gtp.train.loss_and_gradients(loss, *given, recipe=recipe, seed=seed, **options)[1])
        x = drawn(BATCH, 4, 64)
        states = [dataclasses.replace(state, step=state.step + number) for number in steps]
        return [list(flat(run(one, x)).values()) for one in states]


@pytest.mark.parametrize(
    "mesh, options",
    others_full(
        [("gtp 4, tp 2", dict(microbatches=2)), ("gtp 8", {}), ("dp 2, gtp 4", dict(view="local"))],
        [("gtp 4, tp 2", dict(microbatches=2))],
    ),
)
def test_gradients_are_rounded_with_the_bits_of_gtp_jax_own_layers(mesh, options):
    recipe = gtp.NVFP4(matmuls=True)
    (found,), (wanted,) = (rounded_gradients(mesh, own, recipe, **options) for own in (False, True))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.full
def test_bits_differ_by_seed_and_step_and_are_the_same_if_both_are():
    run = functools.partial(rounded_gradients, "gtp 8", False)
    recipe = gtp.NVFP4(matmuls=True)
    first, again, later = run(recipe, steps=(0, 0, 1))
    (other,), (nearest,) = run(recipe, seed=1), run(gtp.NVFP4(matmuls=True, stochastic=False))
    for one, same, *others in zip(first, again, other, later, nearest, strict=True):
        np.testing.assert_array_equal(one, same)
        assert all(np.abs(one - two).max() > 1e-3 * np.abs(one).max() for two in others)


def test_weights_with_the_same_path_are_rounded_by_bits_of_their_own():
    class Twins(nnx.Module):
        def __init__(self, rngs):
            copies = (nnx.Sequential(nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(1))) for _ in range(2))
            self.twins = nnx.List([gtp.shard(one, nnx.Linear, min_size=64) for one in copies])

        def __call__(self, x):
            return sum(twin(x) for twin in self.twins)

    def gradients(recipe):
        loss = lambda model, x: (jnp.sin(3 * model(x)).sum(), jnp.float32(x.size))  # noqa: E731
        with scope(MESHES["gtp 8"]):
            state = gtp.TrainState.create(gtp.init(Twins, nnx.Rngs(0)), optax.sgd(1.0))
            x = drawn(BATCH, 4, 64)
            return list(
                flat(jax.jit(lambda s: gtp.train.loss_and_gradients(loss, s, x, recipe=recipe)[1])(state)).values()
            )

    np.testing.assert_array_equal(*gradients(gtp.NVFP4(matmuls=True, stochastic=False)))
    one, other = gradients(gtp.NVFP4(matmuls=True))
    assert np.abs(one - other).max() > 1e-3 * np.abs(one).max()


def test_a_product_across_blocks_of_one_row_stays_as_it_is_and_is_reported():
    x = drawn(BATCH, 64)
    with scope(MESHES["gtp 8"]):
        dense = nnx.jit(lambda: Dense(nnx.Rngs(0), own=False))()
        model = gtp.shard(nnx.Sequential(*[Turned(one.kernel[...]) for one in dense.blocks]), Turned, min_size=64)
        call = nnx.jit(lambda model, x: model(x))
        with gtp.use_recipe(gtp.MXFP8()):
            wanted = call(model, x)
        with gtp.use_recipe(MATMULS["MXFP8"]):
            np.testing.assert_array_equal(call(model, x), wanted)
        found = gtp.explain(model, MATMULS["MXFP8"], call=lambda model: model(x))
    assert found.unmultiplied == ("layers.0.kernel", "layers.1.kernel")


@pytest.mark.parametrize("name, way", [("MXFP8", "permuted"), ("NVFP4", "rows permuted"), ("NVFP4", "reshaped")])
def test_a_product_in_blocks_contracts_what_blocks_run_along_in_order(name, way):
    class Shuffled(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (64, 96)) / 8)

        def __call__(self, x):
            if way == "permuted":  # every fourth feature in follows another
                return jnp.einsum("bij,jio->bo", x.reshape(-1, 4, 16), self.kernel[...].reshape(16, 4, 96))
            if way == "rows permuted":
                return x @ self.kernel[...].reshape(64, 4, 24).swapaxes(1, 2).reshape(64, 96)
            return jnp.einsum("bij,ijop->bop", x.reshape(-1, 4, 16), self.kernel[...].reshape(4, 16, 8, 12))

    x, recipe = drawn(BATCH, 64), MATMULS[name]
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(lambda: nnx.Sequential(Shuffled(nnx.Rngs(0))))(), Shuffled, min_size=64)
        found = gtp.explain(model, recipe, call=lambda model: model(x))
    assert found.unmultiplied == (() if way == "reshaped" else ("layers.0.kernel",))


@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
def test_matmuls_in_blocks_multiply_what_the_oracle_says_operands_are_rounded_to(name):
    recipe, random = MATMULS[name], np.random.default_rng(0)
    x, g = (random.normal(size=(8, 32, size)).astype(np.float32) for size in (64, 96))
    model = nnx.jit(lambda: nnx.Sequential(nnx.Linear(64, 96, use_bias=False, rngs=nnx.Rngs(0))))()
    with scope(MESHES["gtp 8"]), gtp.use_recipe(recipe):
        kernel = np.asarray(model.layers[0].kernel[...])
        model = gtp.shard(model, nnx.Linear, min_size=64)
        loss = lambda model, x: (model(x) * g).sum()  # noqa: E731
        y = nnx.jit(lambda model, x: model(x))(model, x)
        to_model, to_x = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(model, x)
    (to_kernel,) = jax.tree.leaves(to_model)
    form, operands = recipe.wire, recipe.operands
    weight = rounded(kernel.T, form)
    tokens = dict(columns=True, transform=operands.hadamard)
    forward = [rounded(own, operands.activation) @ weight.T for own in x]  # a rank has one sequence
    back = [rounded(own, operands.gradient) @ rounded(weight, form, columns=True) for own in g]
    summed = sum(
        rounded(one, operands.activation, **tokens).T @ rounded(own, operands.gradient, **tokens)
        for one, own in zip(x, g, strict=True)
    )
    for found, wanted in ((y, forward), (to_x, back), (to_kernel, summed)):
        assert np.linalg.norm(found - np.asarray(wanted)) <= 1e-6 * np.linalg.norm(wanted)


def test_explain_names_the_weights_whose_products_are_found_and_those_that_stay_as_they_are():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.heads = nnx.LinearGeneral(WIDTH, (4, 8), rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
            self.mix = nnx.Einsum("bsi,io->bso", (WIDTH, WIDTH), (WIDTH,), rngs=rngs)
            self.own = nnx.Param(jnp.ones((4, WIDTH, 16)))
            self.conv = nnx.Conv(32, 32, (3,), rngs=rngs)
            self.table = nnx.Param(jnp.ones((WIDTH, WIDTH)))
            self.wide = nnx.Param(jnp.ones((WIDTH, WIDTH)))
            self.batched = nnx.Param(jnp.ones((4, WIDTH, WIDTH)))
            self.scanned = nnx.Param(jnp.ones((WIDTH, WIDTH)))

        def __call__(self, x):
            x = self.mix(self.attention(x)) + jnp.einsum("btd,ndh->btnh", x, self.own[...]).sum((2, 3))[..., None]
            x = self.conv(self.heads(x).reshape(*x.shape)) * self.table[0]
            x, wide = (a.astype(jnp.bfloat16) for a in (x, self.wide[...]))
            x = jnp.dot(x, wide, preferred_element_type=jnp.float32)
            x = jnp.einsum("bti,bio->bto", x.reshape(4, -1, WIDTH), self.batched[...])
            return jax.lax.scan(lambda x, _: (x @ self.scanned[...], None), x, length=2)[0]

    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(lambda: nnx.Sequential(Mixed(nnx.Rngs(0))))(), Mixed, min_size=128)
        found = gtp.explain(model, FP8, call=lambda model: model(jnp.ones((BATCH, 16, WIDTH))))
    names = [f"layers.0.{name}" for name in ("batched", "conv.kernel", "scanned", "table", "wide")]
    assert sorted(found.unmultiplied) == names and ", ".join(found.unmultiplied) in str(found)
    kernels = [f"attention.{name}.kernel" for name in ("key", "out", "query", "value")]
    names = [f"layers.0.{name}" for name in (*kernels, "heads.kernel", "mix.kernel", "own")]
    assert sorted(found.calls[0].multiplied) == names
