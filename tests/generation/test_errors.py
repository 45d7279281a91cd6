"""Invalid arguments and unsupported models are refused, with a message that names the remedy."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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
    "no positions": (lambda: WithoutPositions(attention()), "WithoutPositions does not take `positions`"),
    "positions dropped": (lambda: Drops(attention()), "the model calls attention without `positions` while"),
    "masked": (lambda: Masks(attention()), "the model passes a mask or segments to attention while"),
    "called twice": (lambda: Twice(attention()), "is called more than once in a forward pass, but `gtp_jax.generate`"),
    "both ways": (lambda: Model(attention(causal=False)), "mixer.core attends to later tokens"),
    "cross": (
        lambda: Model(lambda rngs: gtp.CrossAttention(16, num_heads=2, rngs=rngs, **SHARED)),
        "mixer is a CrossAttention, which mixes the tokens of a row but has no cache",
    ),
    "stock": (
        lambda: Model(lambda rngs: nnx.MultiHeadAttention(2, 16, rngs=rngs)),
        "mixer is a MultiHeadAttention, which mixes",
    ),
    "none": (lambda: Model(lambda rngs: gtp.MLP(16, 16, rngs=rngs)), "Model has no `gtp_jax.Attention`"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_go_on_token_by_token_is_refused(name):
    make, message = MODELS[name]
    with pytest.raises(ValueError, match=message):
        gtp.generate(make(), [[1, 2]], max_new_tokens=3)


class TwiceInLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention = gtp.Attention(16, num_heads=2, rngs=rngs, **SHARED)

    def __call__(self, x, *, positions=None):
        return self.attention(x + self.attention(x, positions=positions), positions=positions)


class Looped(Model):
    """Calls its stack twice."""

    __call__ = Twice.__call__


IN_STACKS = {
    "a layer of a stack": lambda: Model(lambda rngs: gtp.Stack(TwiceInLayer, 2, rngs=rngs)),
    "a stack": lambda: Looped(lambda rngs: gtp.Stack(attention(), 2, rngs=rngs)),
}


@pytest.mark.parametrize("gather", ["each_token", "once"])
@pytest.mark.parametrize("name", IN_STACKS)
def test_attention_that_a_stack_calls_twice_is_refused_however_weights_are_gathered(name, gather):
    message = "is called more than once in a forward pass, but `gtp_jax.generate`"
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        model = gtp.init(lambda rngs: IN_STACKS[name](), nnx.Rngs(0))
        with pytest.raises(ValueError, match=message):
            gtp.generate(model, [[1, 2]], max_new_tokens=3, gather=gather)


ARGUMENTS = {
    "empty prompt": (dict(tokens=[[1], []]), "`tokens` has no token in row 1; a prompt has at least one"),
    "ragged with lengths": (dict(tokens=[[1, 2], [3]], lengths=[2, 1]), "`tokens` has rows or .* without `lengths`"),
    "nested": (dict(tokens=[[1, 2], [[3], 4]]), "`tokens` has rows or entries of different lengths"),
    "large": (dict(tokens=[[1, 2**32 + 5]]), r"`tokens` holds 4294967301; .* below 2\*\*31"),
    "many": (dict(max_new_tokens=2**31 - 1), "`max_new_tokens` is 2147483647; it must be at most 2147483646"),
    "no prompt": (dict(tokens=[]), r"`tokens` has the shape \(0,\); it must be \(batch, length\)"),
    "rank": (dict(tokens=np.zeros(3, int)), r"`tokens` has the shape \(3,\)"),
    "negative": (dict(tokens=[[1, -2]]), "`tokens` holds -2; tokens are indices of a vocabulary"),
    "lengths": (dict(tokens=np.ones((2, 3), int), lengths=[1, 4]), r"`lengths` is \[1 4\]; it must be 2 whole"),
    "count": (dict(max_new_tokens=0), "`max_new_tokens` is 0; it must be a whole number of at least 1"),
    "temperature": (dict(temperature=-1.0), "`temperature` is -1.0; it must be a finite number of at least 0"),
    "infinite": (dict(temperature=float("inf")), "`temperature` is inf; it must be .*; 0 takes"),
    "no temperature": (
        dict(temperature=float("nan")),
        "`temperature` is nan; it must be a finite number of at least 0",
    ),
    "no top_p": (dict(top_p=float("nan")), "`top_p` is nan; it must be a probability, above 0 and at most 1"),
    "top_k": (dict(top_k=0), "`top_k` is 0; it must be a number of tokens"),
    "top_p": (dict(top_p=1.5), "`top_p` is 1.5; it must be a probability"),
    "seed": (dict(seed=-1), "`seed` is -1; it must be a whole number from 0"),
    "true top_p": (dict(top_p=True), "`top_p` is True; it must be a probability"),
    "true temperature": (dict(temperature=True), "`temperature` is True; it must be a finite number"),
    "true vocabulary": (dict(vocab_size=True), r"`vocab_size` is True; it must be .* below 2\*\*31, or None for all"),
    "bytes stop": (dict(stop=b"x"), "`stop` is b'x'; it must be tokens .whole numbers. or texts, one or a list"),
    "true stop": (dict(stop=[True]), r"`stop` is \[True\]; it must be tokens"),
    "set stop": (dict(stop={3}), r"`stop` is \{3\}; it must be tokens .whole numbers. or texts, one or a list of them"),
    "stop": (dict(stop=1.5), r"`stop` is 1.5; it must be tokens \(whole numbers\) or texts"),
    "text stop": (dict(stop=[3, "x"]), r"`stop` is \[3, 'x'\]; its texts need a tokenizer. Give `tokenizer`"),
    "empty stop": (dict(stop=""), "`stop` is ''; an empty text would end every row"),
    "negative stop": (dict(stop=[3, -1]), r"`stop` is \[3, -1\]; tokens are indices of a vocabulary, at least 0"),
    "large stop": (dict(stop=10**400), r"`stop` is 10+\.\.\.0+; tokens are .* below 2\*\*31"),
    "gather": (dict(gather="always"), "`gather` is 'always'; it must be 'once'"),
    "vocabulary": (dict(tokens=[[1, 2], [3, 100]]), "the logits of row 1 are NaN. .* largest of which is 100"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_bad_argument_is_named(name, x64):
    options, message = ARGUMENTS[name]
    with pytest.raises(ValueError, match=message):
        gtp.generate(model_of(DENSE), **{"tokens": [[1, 2]], "max_new_tokens": 2, **options})


def test_tokens_and_models_of_another_type_are_named(x64):
    with pytest.raises(TypeError, match="`tokens` are float64; they must be integers"):
        gtp.generate(model_of(DENSE), [[1.0, 2.0]], max_new_tokens=2)
    with pytest.raises(TypeError, match="`model` is a function; it must be an `nnx.Module`"):
        gtp.generate(lambda tokens: tokens, [[1, 2]], max_new_tokens=2)
    with pytest.raises(TypeError, match="`model` is a List, which has no `__call__`. Write `def __call__"):
        gtp.generate(nnx.List([model_of(DENSE)]), [[1, 2]], max_new_tokens=2)
    with pytest.raises(TypeError, match=r"`tokenizer` is a str; it must have `decode\(tokens\)`, which returns text"):
        gtp.generate(model_of(DENSE), [[1, 2]], max_new_tokens=2, stop="x", tokenizer="tokenizer.json")


def test_arguments_are_refused_before_anything_is_yielded(x64):
    with pytest.raises(ValueError, match="`top_k` is 0"):
        gtp.generate_stream(model_of(DENSE), [[1, 2]], max_new_tokens=2, top_k=0)


@pytest.mark.parametrize("taken", [0, 1], ids=["before the first tokens", "after the first tokens"])
@pytest.mark.parametrize("other", ["none", "other degrees", "other devices"])
def test_tokens_are_streamed_only_under_the_mesh_of_the_call(other, taken, x64):
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        stream = gtp.generate_stream(model_of(DENSE), [[1, 2], [3, 4]], max_new_tokens=4)
        parts = [next(stream) for _ in range(taken)]
    assert len(parts) == taken
    mesh, words = {
        "none": (None, "no mesh"),
        "other degrees": (gtp.make_mesh(gtp=2, tp=4), "a mesh with dp 1 x gtp 2 x tp 4"),
        "other devices": (
            gtp.make_mesh(gtp=4, tp=2, devices=jax.devices()[::-1]),
            "a mesh with dp 1 x gtp 4 x tp 2 on other devices",
        ),
    }[other]
    message = rf"made under a mesh with dp 1 x gtp 4 x tp 2, but the next tokens .* under {words}\. Iterate inside"
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), pytest.raises(ValueError, match=message):
        next(stream)


def test_a_stream_whose_rows_have_ended_ends_under_any_mesh(x64):
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        stream = gtp.generate_stream(model_of(DENSE), [[1, 2]], max_new_tokens=1)
        assert next(stream).shape == (1, 1)
    assert list(stream) == []
