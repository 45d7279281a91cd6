"""Invalid arguments and unsupported models are refused, with a message that names the remedy."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp

from .models import DENSE, model_of

SHARED = dict(dtype=jnp.float32)


class Model(nnx.Module):
    """A model with whatever mixes tokens."""

    def __init__(self, mixer, rngs=None):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.embed = gtp.Embed(20, 16, rngs=rngs, **SHARED)
        self.mixer = mixer(rngs)
        self.head = gtp.Dense(16, 20, rngs=rngs, **SHARED)

    def __call__(self, tokens, *, positions=None):
        return self.head(self.mixer(self.embed(tokens), positions=positions))


class WithoutPositions(Model):
    def __call__(self, tokens):
        return self.head(self.mixer(self.embed(tokens)))


class Drops(Model):
    def __call__(self, tokens, *, positions=None):
        return self.head(self.mixer(self.embed(tokens)))


class Masks(Model):
    def __call__(self, tokens, *, positions=None):
        mask = jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool)
        return self.head(self.mixer(self.embed(tokens), positions=positions, mask=mask))


class Twice(Model):
    def __call__(self, tokens, *, positions=None):
        x = self.mixer(self.embed(tokens), positions=positions)
        return self.head(self.mixer(x, positions=positions))


def attention(**options):
    return lambda rngs: gtp.Attention(16, num_heads=2, rngs=rngs, **SHARED, **options)


MODELS = {
    "no positions": (lambda: WithoutPositions(attention()), "WithoutPositions `positions`"),
    "positions dropped": (lambda: Drops(attention()), "`positions`"),
    "masked": (lambda: Masks(attention()), "mask segments"),
    "called twice": (lambda: Twice(attention()), "more than once `gtp_jax.generation.generate`"),
    "both ways": (lambda: Model(attention(causal=False)), "mixer.core later"),
    "stock": (lambda: Model(lambda rngs: nnx.MultiHeadAttention(2, 16, rngs=rngs)), "mixer MultiHeadAttention"),
    "none": (lambda: Model(lambda rngs: gtp.MLP(16, 16, rngs=rngs)), "Model `gtp_jax.Attention`"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_go_on_token_by_token_is_refused(name):
    make, message = MODELS[name]
    with pytest.raises(ValueError, match=naming(message)):
        gtp.generation.generate(make(), [[1, 2]], max_new_tokens=3)


class TwiceInLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention = gtp.Attention(16, num_heads=2, rngs=rngs, **SHARED)

    def __call__(self, x, *, positions=None):
        return self.attention(x + self.attention(x, positions=positions), positions=positions)


IN_STACKS = {
    "a layer of a stack": lambda: Model(lambda rngs: gtp.Stack(TwiceInLayer, 2, rngs=rngs)),
    "a stack": lambda: Twice(lambda rngs: gtp.Stack(attention(), 2, rngs=rngs)),
}


@pytest.mark.parametrize(
    "name, gather", others_full([("a stack", "once"), ("a layer of a stack", "each_token")], [("a stack", "once")])
)
def test_attention_that_a_stack_calls_twice_is_refused_however_weights_are_gathered(name, gather):
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        model = gtp.init(lambda rngs: IN_STACKS[name](), nnx.Rngs(0))
        with pytest.raises(ValueError, match=naming("more than once `gtp_jax.generation.generate`")):
            gtp.generation.generate(model, [[1, 2]], max_new_tokens=3, gather=gather)


ARGUMENTS = {
    "empty prompt": (dict(tokens=[[1], []]), "`tokens` row 1"),
    "large": (dict(tokens=[[1, 2**32 + 5]]), "`tokens` 4294967301 2**31"),
    "negative": (dict(tokens=[[1, -2]]), "`tokens` -2"),
    "lengths": (dict(tokens=np.ones((2, 3), int), lengths=[1, 4]), "`lengths` [1 4] 2"),
    "count": (dict(max_new_tokens=0), "`max_new_tokens` 0 whole"),
    "temperature": (dict(temperature=-1.0), "`temperature` -1.0 finite"),
    "top_k": (dict(top_k=0), "`top_k` 0"),
    "top_p": (dict(top_p=1.5), "`top_p` 1.5 probability"),
    "seed": (dict(seed=-1), "`seed` -1 whole"),
    "text stop": (dict(stop=[3, "x"]), "`stop` [3, 'x'] `tokenizer`"),
    "negative stop": (dict(stop=[3, -1]), "`stop` [3, -1] vocabulary"),
    "gather": (dict(gather="always"), "`gather` 'always' 'once'"),
    "vocabulary": (dict(tokens=[[1, 2], [3, 100]]), "row 1 NaN 100"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_bad_argument_is_named(name, x64):
    options, message = ARGUMENTS[name]
    with pytest.raises(ValueError, match=naming(message)):
        gtp.generation.generate(model_of(DENSE), **{"tokens": [[1, 2]], "max_new_tokens": 2, **options})
    if name == "top_k":  # before anything is yielded
        with pytest.raises(ValueError, match=naming(message)):
            gtp.generation.generate_stream(model_of(DENSE), [[1, 2]], max_new_tokens=2, top_k=0)


def test_tokens_and_models_of_another_type_are_named(x64):
    for changed, message in (
        (dict(tokens=[[1.0, 2.0]]), "`tokens` float64 integers"),
        (dict(model=lambda tokens: tokens), "`model` function `nnx.Module`"),
        (dict(model=nnx.List([model_of(DENSE)])), "`model` List `__call__`"),
        (dict(stop="x", tokenizer="tokenizer.json"), "`tokenizer` str `decode(tokens)`"),
    ):
        with pytest.raises(TypeError, match=naming(message)):
            gtp.generation.generate(**{"model": model_of(DENSE), "tokens": [[1, 2]], "max_new_tokens": 2, **changed})


@pytest.mark.parametrize("other, taken", [("none", 1), ("other degrees", 0), ("other devices", 1)])
def test_tokens_are_streamed_only_under_the_mesh_of_the_call(other, taken, x64):
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        stream = gtp.generation.generate_stream(model_of(DENSE), [[1, 2], [3, 4]], max_new_tokens=4)
        assert len([next(stream) for _ in range(taken)]) == taken
    mesh, words = {
        "none": (None, "no mesh"),
        "other degrees": (gtp.make_mesh(gtp=2, tp=4), "gtp 2 tp 4"),
        "other devices": (gtp.make_mesh(gtp=4, tp=2, devices=jax.devices()[::-1]), "other devices"),
    }[other]
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        with pytest.raises(ValueError, match=naming("gtp 4 tp 2", words, "Iterate inside")):
            next(stream)
