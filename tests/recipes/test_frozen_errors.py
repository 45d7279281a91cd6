"""What cannot be frozen, or done with what is, is refused by a message that says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed

import gtp_jax as gtp
from gtp_jax.nn import abstract_model

WIDTH = 64


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = gtp.Stack(lambda rngs: gtp.MLP(WIDTH, WIDTH, rngs=rngs), 2, rngs=rngs)
        self.pair = gtp.Dense(WIDTH, {"a": WIDTH, "b": WIDTH}, rngs=rngs)
        self.lora = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.blocks(x)
        return self.pair(x)["a"] + self.lora(x)


def frozen(recipe=None, **options):
    return gtp.freeze(placed(Model), recipe, **options)


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        yield


class Narrow(nnx.Module):
    """Has shards of input features, of 24 rows each: a block and a half."""

    def __init__(self, rngs):
        self.narrow, self.lora = gtp.Dense(256, 24, rngs=rngs), nnx.LoRA(256, 2, 24, rngs=rngs)


def frozen_over(degree, make, recipe):
    with jax.set_mesh(gtp.make_mesh(gtp=degree, devices=jax.devices()[:degree])):
        gtp.freeze(placed(make), recipe)


REFUSED = {
    "elements of codes": (
        lambda: frozen(gtp.NVFP4()).pair.kernel["a"][...],
        "NVFP4 `gtp_jax.dequantize(kernel.get_value())`",
    ),
    "no recipe": (lambda: frozen("nvfp4"), "`recipe` 'nvfp4'"),
    "shards of no whole blocks": (
        lambda: frozen_over(8, Model, gtp.NVFP4(exclude=("blocks",))),
        "(64, 64) pair NVFP4 FP8",
    ),
    "columns of no whole blocks": (lambda: frozen_over(4, Narrow, gtp.NVFP4()), "(256, 24) narrow NVFP4"),
    "nothing is trained": (lambda: frozen(trained=nnx.PathContains("adapter")), "`trained` adapter none nothing"),
    "nothing of two is trained": (lambda: gtp.freeze(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), "(bias, kernel) nothing"),
    "no parameters": (
        lambda: gtp.freeze(gtp.freeze(Model(nnx.Rngs(0)), trained=nnx.PathContains("pair")).blocks),
        "no parameters nothing",
    ),
    "nothing is frozen": (lambda: frozen(trained=nnx.Param), "all nothing"),
    "some of one gather": (lambda: frozen(trained=nnx.Any(nnx.LoRAParam, nnx.PathContains("b"))), "pair `trained`"),
    "stochastic rounding": (
        lambda: frozen(gtp.NVFP4(matmuls=True)),
        "blocks.layers. stochastically NVFP4(matmuls=True, stochastic=False)",
    ),
    "layers that differ": (
        lambda: frozen(gtp.NVFP4(high_precision_last=1)),
        "`high_precision_first` `high_precision_last` `Stack`",
    ),
    "a pattern of nothing": (lambda: frozen(gtp.NVFP4(override={"attn": gtp.FP8()})), "'attn' no module"),
    "an abstract model": (lambda: gtp.freeze(abstract_model(Model), gtp.NVFP4()), "abstract gtp_jax.freeze"),
    "a frozen weight is set": (
        lambda: frozen().pair.kernel["a"].set_value(jnp.zeros((WIDTH, WIDTH))),
        "`kernel[...] = pretrained` `gtp_jax.freeze`",
    ),
    "a recipe of frozen weights": (lambda: gtp.explain(frozen(gtp.NVFP4()), gtp.NVFP4()), "frozen quantize"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_message(name):
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=naming(message)):
        call()


def test_a_frozen_kernel_that_a_layer_of_a_chain_reads_is_refused_like_a_trained_one():
    class Reads(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.adapter = gtp.Dense(WIDTH, WIDTH, rngs=rngs), nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.adapter(x) + x @ self.dense.kernel[...]

    stack = gtp.init(lambda rngs: gtp.Stack(Reads, 2, rngs=rngs), nnx.Rngs(0))
    for model in (stack, gtp.freeze(stack)):
        with pytest.raises(TypeError, match=naming("array read written `Stack`")):
            jax.eval_shape(lambda x: model(x), jnp.ones((2, WIDTH)))  # noqa: B023


def test_a_pattern_of_frozen_modules_is_said_to_match_only_these():
    """And the modules that recipes apply to are listed, or said to be none."""
    some = frozen(trained=nnx.PathContains("blocks"))
    for model, listed in ((some, "blocks.layers.down blocks.layers.up"), (frozen(), "no weights Model remove")):
        with pytest.raises(ValueError, match=naming("'pair' only frozen", listed)):
            gtp.explain(model, gtp.BF16(exclude=("pair",)))


def test_a_gradient_of_what_is_frozen_is_refused():
    """It would be zeros, where the codes are gathered ahead of the layer that multiplies them."""
    graph, wanted, rest = nnx.split(frozen(), nnx.PathContains("blocks"), ...)

    def loss(wanted):
        return jnp.sum(nnx.merge(graph, wanted, rest)(jnp.ones((2, WIDTH))).astype(jnp.float32))

    with pytest.raises(ValueError, match=naming("gradient frozen `nnx.grad(loss)`")):
        jax.eval_shape(jax.grad(loss), wanted)


def test_the_model_is_left_as_it_is_when_a_step_donates_what_was_frozen():
    base = Model(nnx.Rngs(0))
    step = gtp.train_step(lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2), optax.sgd(0.1))
    step(gtp.TrainState.create(gtp.freeze(base, gtp.FP8()), optax.sgd(0.1)), jnp.ones((8, WIDTH)))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(base, nnx.Param))))


def test_a_model_on_another_mesh_is_refused():
    model = frozen(gtp.FP8())
    state = gtp.TrainState.create(model, optax.sgd(0.1))
    with jax.set_mesh(gtp.make_mesh(gtp=8)), pytest.raises(ValueError, match=naming("mesh built")):
        gtp.eval_step(lambda model, x: jnp.sum(model(x)))(state, jnp.ones((8, 2, WIDTH)))


def test_explain_says_what_is_frozen():
    text = str(gtp.explain(frozen(gtp.MXFP8(), trained=nnx.LoRAParam), None))
    assert "none: frozen" in text and "MXFP8" in text
