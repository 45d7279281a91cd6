"""`grad_reduce="float32"`: products return gradients of weights in float32, and ranks sum them in float32."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo

from .programs import compiled
from .recipes import ALL_MESHES, BATCH, MATMULS, Dense, flat
from .steps import scope
from .test_overlap_h200 import ELEMENTS, TABLE

BF16 = jnp.bfloat16


def normal(_, shape, dtype):
    return jax.random.normal(jax.random.key(shape[0]), shape, dtype) / 8


def dense(rngs, own, tp=False):
    """Two blocks that compute in bfloat16, of stock layers or of gtp_jax's own."""
    return Dense(rngs, own, hidden=192, tp=tp, dtype=BF16, init=normal)


@nnx.jit
def dense_stock():
    return dense(nnx.Rngs(0), own=False)


def loss(model, x):
    return jnp.sin(3 * model(x).astype(jnp.float32)).sum(), jnp.float32(x.size)


def batch():
    return np.random.default_rng(0).normal(size=(BATCH, 4, 64)).astype(np.float32)


def gradients(factory, mesh, **options):
    """Returns the gradients of one step, by name, and whether they hold more than bfloat16 can."""
    with scope(dict(gtp=1) if mesh == "gtp 1" else ALL_MESHES[mesh]):
        state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), optax.sgd(1.0))
        _, found = jax.jit(lambda state, x: gtp.train.loss_and_gradients(loss, state, x, **options))(state, batch())
        found = flat(found)
    return found, any((g != g.astype(BF16).astype(np.float32)).any() for g in found.values())


def sharded(rngs, tp=False, **options):
    return gtp.shard(dense(rngs, own=False, tp=tp), "blocks.*", min_size=64, **options)


CASES = [
    (None, "gtp 8", "global"),
    (None, "dp 2, gtp 4", "local"),
    (None, "gtp 4, tp 2", "global"),
    ("NVFP4", "gtp 8", "global"),
    ("FP8", "dp 2, gtp 4", "local"),
]


@pytest.mark.parametrize("name, mesh, view", others_full(CASES, CASES[4:5]))
def test_gradients_are_those_of_gtp_jax_own_layers(name, mesh, view):
    recipe, tp = MATMULS.get(name), "tp" in mesh
    options = dict(recipe=recipe, view=view)
    wanted, _ = gradients(lambda rngs: dense(rngs, own=True, tp=tp), mesh, **options)
    found, wide = gradients(lambda rngs: sharded(rngs, tp, grad_reduce="float32"), mesh, **options)
    rounded, too_wide = gradients(lambda rngs: sharded(rngs, tp), mesh, **options)
    assert wide and not too_wide
    for name, gradient in wanted.items():
        size = np.abs(gradient).max()
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-5 * size)
        assert np.abs(rounded[name] - gradient).max() > 5e-4 * size


class Mixed(nnx.Module):
    """Blocks with a convolution, heads, a weight in float32, a table that is looked up, and weights whose products are
    not found: one that is scaled, and layers of a scan."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, dtype=BF16, rngs=rngs)
        self.heads = nnx.LinearGeneral(32, (4, 8), use_bias=False, dtype=BF16, rngs=rngs)
        self.conv = nnx.Conv(32, 32, (3,), use_bias=False, dtype=BF16, rngs=rngs)
        self.exact = nnx.Linear(32, 32, use_bias=False, rngs=rngs)
        self.scaled = nnx.Param(jnp.ones((32, 32)))
        self.scanned = nnx.Param(jnp.ones((2, 32, 32)))

    def __call__(self, tokens):
        x = self.conv(self.heads(self.embed(tokens)).reshape(*tokens.shape, 32))
        x = x @ (self.scaled[...] / 2).astype(BF16)
        x, _ = jax.lax.scan(lambda x, layer: (x @ layer.astype(BF16), None), x, self.scanned[...])
        return self.exact(x.astype(jnp.float32))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Mixed(rngs)])

    def __call__(self, tokens):
        return self.blocks[0](tokens)


def test_explain_names_the_weights_whose_gradients_keep_the_dtype_of_the_computation():
    tokens = jnp.ones((BATCH, 4), jnp.int32)
    with scope(ALL_MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(Model)(nnx.Rngs(0)), "blocks.*", min_size=64, grad_reduce="float32")
        found = gtp.explain(model, call=lambda model: model(tokens))
        plain = gtp.shard(nnx.jit(Model)(nnx.Rngs(0)), "blocks.*", min_size=64)
        assert gtp.explain(plain, call=lambda model: model(tokens)).narrow == ()
        life = str(gtp.explain(model, path="blocks.0.heads.kernel"))
    assert re.search(naming("at least float32 products"), life)
    assert found.narrow == tuple(f"blocks.0.{name}" for name in ("conv.kernel", "embed.embedding", "scaled", "scanned"))
    assert ", ".join(found.narrow) in str(found), "some have a product"


class Loop(nnx.Module):
    """A `while_loop` whose condition reads one weight in bfloat16, and whose body reads another in float32."""

    def __init__(self, rngs):
        self.bound = nnx.Param(jnp.ones((32, 32)))
        self.step = nnx.Param(jnp.ones((32, 32)))

    def __call__(self, x):
        scale = x[0, 0].astype(BF16)
        more = lambda x: x.sum().astype(BF16) < scale * self.bound[...].astype(BF16).sum()  # noqa: E731
        return jax.lax.while_loop(more, lambda x: x + x @ self.step[...], x)


def test_explain_tells_the_weights_of_a_loops_condition_from_those_of_its_body():
    with scope(ALL_MESHES["gtp 8"]):
        model = nnx.jit(Model)(nnx.Rngs(0))
        model.blocks = nnx.List([nnx.jit(Loop)(nnx.Rngs(0))])
        model = gtp.shard(model, "blocks.*", min_size=64, grad_reduce="float32")
        found = gtp.explain(model, call=lambda model: model(jnp.ones((BATCH, 32))))
    assert found.narrow == ("blocks.0.bound",)


class Carried(nnx.Module):
    """Loops that carry weights. One carries `exact` in float32 and `low` in bfloat16. One carries `late` with an
    activation; `late` is rounded after the loop. One rotates three weights twice, and rounds the one in front."""

    NAMES = ("exact", "low", "late", "first", "second", "third")

    def __init__(self, rngs):
        for name in self.NAMES:
            setattr(self, name, nnx.Param(jax.random.normal(rngs.params(), (32, 32)) / 8))

    def __call__(self, x):
        pair = self.exact[...], self.low[...].astype(BF16)
        (exact, low), _ = jax.lax.scan(lambda pair, _: ((pair[0] * 2, pair[1] * 2), None), pair, length=3)
        x = x @ exact + (x.astype(BF16) @ low).astype(jnp.float32)
        x, late = jax.lax.fori_loop(0, 3, lambda _, pair: (jnp.tanh(pair[0]), pair[1] / 2), (x, self.late[...]))
        x = x + (x.astype(BF16) @ late.astype(BF16)).astype(jnp.float32)

        def turn(carry, _):
            x, one, two, three = carry
            return (x + (x.astype(BF16) @ one.astype(BF16)).astype(jnp.float32), two, one, three), None

        (x, *_, three), _ = jax.lax.scan(turn, (x, self.first[...], self.second[...], self.third[...]), length=2)
        return x @ three


def test_explain_names_exactly_the_weights_that_loops_hold_in_a_narrow_dtype():
    x = np.random.default_rng(1).normal(size=(BATCH, 32)).astype(np.float32)

    def factory(rngs):
        model = Model(rngs)
        model.blocks = nnx.List([Carried(rngs)])
        return gtp.shard(model, "blocks.*", min_size=64, grad_reduce="float32")

    with scope(ALL_MESHES["gtp 8"]):
        found = gtp.explain(gtp.init(factory, nnx.Rngs(0)), call=lambda model: model(x))
        state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), optax.sgd(1.0))
        _, gradients = jax.jit(lambda state, x: gtp.train.loss_and_gradients(loss, state, x))(state, x)
        gradients = flat(gradients)
    assert set(found.narrow) == {f"blocks.0.{name}" for name in ("low", "late", "first", "second")}
    rounded = lambda g: g.astype(BF16).astype(np.float32)  # noqa: E731
    for name in ("exact", "third"):
        (gradient,) = [g for key, g in gradients.items() if name in str(key)]
        assert (gradient != rounded(gradient)).any()


class Idle(nnx.Module):
    """A scan of no iterations, which carries a weight in float32, and whose body would return it in bfloat16."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (32, 32)) / 8)

    def __call__(self, x):
        kernel, rounded = jax.lax.scan(lambda w, _: (w, w.astype(BF16)), self.kernel[...], length=0)
        return x @ kernel + rounded.sum().astype(jnp.float32)


def test_a_scan_of_no_iterations_returns_what_it_carries_and_rounds_no_gradient():
    x = np.random.default_rng(1).normal(size=(BATCH, 32)).astype(np.float32)
    model, call = nnx.Sequential(nnx.jit(Idle)(nnx.Rngs(0))), nnx.jit(lambda model: model(x))
    wanted = call(model)
    with scope(ALL_MESHES["gtp 8"]):
        model = gtp.shard(model, Idle, min_size=64, grad_reduce="float32")
        assert gtp.explain(model, call=lambda model: model(x)).narrow == ()
        np.testing.assert_allclose(call(model), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


class Rounded(nnx.Module):
    """A block that rounds its own weight to FP8 before it multiplies."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(normal(None, (64, 64), jnp.float32))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.kernel[...].astype(jnp.float8_e4m3fn).astype(BF16).astype(x.dtype))


@pytest.mark.full
def test_a_block_may_round_its_weights_to_eight_bits():
    make = lambda rngs: nnx.Sequential(Rounded(rngs), Rounded(rngs))  # noqa: E731
    shard = lambda rngs: gtp.shard(make(rngs), Rounded, min_size=64, grad_reduce="float32")  # noqa: E731
    (found, _), (wanted, _) = (gradients(shard, mesh) for mesh in ("gtp 8", "gtp 1"))
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("remat", others_full(["nothing", "everything"], ["nothing"]))
def test_remat_and_frozen_weights_change_no_gradient(remat):
    def of_up(model, x, **options):
        with scope(ALL_MESHES["gtp 8"]):
            model = gtp.shard(model, "blocks.*", min_size=64, grad_reduce="float32", **options)
            mean = lambda model, x: loss(model, x)[0] / x.size  # noqa: E731
            only = nnx.DiffState(0, nnx.PathContains(0)) if options else 0
            return next(iter(flat(nnx.jit(nnx.grad(mean, argnums=only))(model, x)).values()))

    wanted = of_up(dense_stock(), batch())
    found = of_up(dense_stock(), batch(), remat=remat)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.full
def test_second_derivatives_are_those_without_a_slot():
    def penalty(model, x):
        inner = lambda x: loss(model, x)[0]  # noqa: E731
        return (jax.grad(inner)(x) ** 2).mean()

    found = []
    for grad_reduce in (None, "float32"):
        with scope(ALL_MESHES["gtp 8"]):
            model = gtp.shard(dense_stock(), "blocks.*", min_size=64, grad_reduce=grad_reduce)
            found.append(flat(nnx.jit(nnx.grad(penalty))(model, batch())))
    for name, gradient in found[0].items():
        assert np.linalg.norm(found[1][name] - gradient) < 2e-2 * np.linalg.norm(gradient)


@pytest.mark.slow
@pytest.mark.skipif(bool(missing := hlo.missing_packages()), reason=f"compiling for H200 needs {', '.join(missing)}")
def test_each_matrix_is_reduced_once_and_in_float32():
    scattered = hlo.launch_order(compiled(grad_reduce="float32")[0]).collectives("reduce-scatter")
    sizes = {"f32": 0, "bf16": 0}
    for shape in (shape for e in scattered for shape in e.collective.operands):
        sizes[shape.dtype] += shape.elements
    assert sizes == {"f32": ELEMENTS - TABLE, "bf16": TABLE}  # the table is looked up, which is no product
