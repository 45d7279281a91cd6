"""What cannot be frozen, or done with what is, is refused by a message that says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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
    return gtp.freeze(Model(nnx.Rngs(0)), recipe, **options)


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        yield


REFUSED = {
    "nothing is trained": (
        lambda: frozen(trained=nnx.PathContains("adapter")),
        r"`trained` is .*adapter.*, which matches none of the model's parameters \(blocks.*\.\.\.\), so there would",
    ),
    "nothing of two is trained": (
        lambda: gtp.freeze(nnx.Linear(2, 2, rngs=nnx.Rngs(0))),
        r"which matches none of the model's parameters \(bias, kernel\), so there would be nothing to train",
    ),
    "no parameters": (
        lambda: gtp.freeze(gtp.freeze(Model(nnx.Rngs(0)), trained=nnx.PathContains("pair")).blocks),
        "the model has no parameters, or all of them are frozen already, so there is nothing to freeze",
    ),
    "nothing is frozen": (lambda: frozen(trained=nnx.Param), r"matches all of the model's parameters, so nothing"),
    "some of one gather": (
        lambda: frozen(trained=nnx.Any(nnx.LoRAParam, nnx.PathContains("b"))),
        r"some kernels of pair match `trained` and others do not. They are gathered together",
    ),
    "stochastic rounding": (
        lambda: frozen(gtp.NVFP4(matmuls=True)),
        r"gradients that pass through blocks\.layers\.\w+ stochastically, .*NVFP4\(matmuls=True, stochastic=False\)",
    ),
    "layers that differ": (
        lambda: frozen(gtp.NVFP4(high_precision_last=1)),
        r"`high_precision_first` and `high_precision_last` make layers of a `Stack` differ",
    ),
    "a pattern of nothing": (lambda: frozen(gtp.NVFP4(override={"attn": gtp.FP8()})), r"'attn' matches no module"),
    "an abstract model": (
        lambda: gtp.freeze(abstract_model(Model), gtp.NVFP4()),
        r"the model is abstract.*abstract_model\(lambda rngs: gtp_jax\.freeze",
    ),
    "a frozen weight is set": (
        lambda: frozen().pair.kernel["a"].set_value(jnp.zeros((WIDTH, WIDTH))),
        r"a frozen weight cannot be set.*`kernel\[\.\.\.\] = pretrained`\) before `gtp_jax\.freeze`",
    ),
    "a recipe of frozen weights": (
        lambda: gtp.explain(frozen(gtp.NVFP4()), gtp.NVFP4()),
        r"has no gathered weights other than frozen ones to quantize",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_message(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_elements_of_codes_are_refused():
    with pytest.raises(
        TypeError, match=r"NVFP4 codes\. Read its values with `gtp_jax\.dequantize\(kernel\.get_value\(\)\)`"
    ):
        frozen(gtp.NVFP4()).pair.kernel["a"][...]


def test_no_recipe_is_refused():
    with pytest.raises(TypeError, match="`recipe` is 'nvfp4'"):
        frozen("nvfp4")


def test_shards_that_are_no_whole_blocks_are_refused():
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        with pytest.raises(
            ValueError, match=r"shape \(64, 64\) of pair has shards .* cannot be divided into blocks of NVFP4.*FP8"
        ):
            frozen(gtp.NVFP4(exclude=("blocks",)))
        assert frozen(gtp.FP8()).pair.kernel["a"].get_value().codes.dtype == np.uint8


class Reads(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.adapter = gtp.Dense(WIDTH, WIDTH, rngs=rngs), nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.adapter(x) + x @ self.dense.kernel[...]


def test_a_frozen_kernel_that_a_layer_of_a_chain_reads_is_refused_like_a_trained_one():
    stack = gtp.Stack(lambda rngs: Reads(rngs), 2, rngs=nnx.Rngs(0))
    for model in (stack, gtp.freeze(stack)):
        with pytest.raises(TypeError, match="the array of a weight is read or written by a layer of a `Stack`"):
            model(jnp.ones((2, WIDTH)))


class Narrow(nnx.Module):
    """Has shards of input features, of 24 rows each: a block and a half."""

    def __init__(self, rngs):
        self.narrow, self.lora = gtp.Dense(256, 24, rngs=rngs), nnx.LoRA(256, 2, 24, rngs=rngs)


def test_shards_of_columns_with_rows_that_are_no_whole_blocks_are_refused():
    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])):
        with pytest.raises(
            ValueError, match=r"shape \(256, 24\) of narrow has shards .* cannot be divided into blocks of NVFP4"
        ):
            gtp.freeze(Narrow(nnx.Rngs(0)), gtp.NVFP4())


@pytest.mark.parametrize("pattern", ["pair", "blocks"])
def test_a_pattern_of_frozen_modules_is_said_to_match_only_these(pattern):
    """And the modules that recipes apply to are listed, or said to be none."""
    only = rf"'{pattern}' matches no module with weights that recipes apply to, only frozen ones\. Recipes apply "
    some = frozen(trained=nnx.PathContains("blocks" if pattern == "pair" else "pair"))
    there = r"to blocks\.layers\.down, blocks\.layers\.up\.$" if pattern == "pair" else r"to pair\.$"
    for model, listed in ((some, there), (frozen(), r"to no weights of Model; remove the pattern\.$")):
        with pytest.raises(ValueError, match=only + listed):
            gtp.explain(model, gtp.BF16(exclude=(pattern,)))


@pytest.mark.parametrize("path", ["pair", "blocks"])
def test_a_gradient_of_what_is_frozen_is_refused(path):
    """It would be zeros, where the codes are gathered ahead of the layer that multiplies them."""
    graph, wanted, rest = nnx.split(frozen(), nnx.PathContains(path), ...)

    def loss(wanted):
        return jnp.sum(nnx.merge(graph, wanted, rest)(jnp.ones((2, WIDTH))).astype(jnp.float32))

    with pytest.raises(ValueError, match=r"gradient of \d frozen weights, with shapes .*, is .*`nnx\.grad\(loss\)`"):
        jax.grad(loss)(wanted)


def test_the_model_is_left_as_it_is_when_a_step_donates_what_was_frozen():
    base = Model(nnx.Rngs(0))
    step = gtp.train_step(lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2), optax.sgd(0.1))
    step(gtp.TrainState.create(gtp.freeze(base, gtp.FP8()), optax.sgd(0.1)), jnp.ones((8, WIDTH)))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(base, nnx.Param))))


def test_a_model_on_another_mesh_is_refused():
    model = frozen(gtp.FP8())
    state = gtp.TrainState.create(model, optax.sgd(0.1))
    with jax.set_mesh(gtp.make_mesh(gtp=8)), pytest.raises(ValueError, match=r"built for a mesh with"):
        gtp.eval_step(lambda model, x: jnp.sum(model(x)))(state, jnp.ones((8, 2, WIDTH)))


def test_explain_says_what_is_frozen():
    text = str(gtp.explain(frozen(gtp.MXFP8(), trained=nnx.LoRAParam), None))
    assert "none: frozen" in text and "MXFP8" in text
