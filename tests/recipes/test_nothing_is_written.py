"""A recipe reaches modules as the values of their variables: no attribute of any is written after its construction."""

import dataclasses
import sys
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model
from gtp_jax.recipes import RECIPES

CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128
)
EVERY = {
    **{name: make() for name, make in RECIPES.items()},
    "of layers": gtp.NVFP4(matmuls=True, high_precision_first=1, high_precision_last=1),
    "of modules": gtp.MXFP8(exclude=(), override={"mlp.down": gtp.FP8(matmuls=True), "head": gtp.NVFP4()}),
    "of gradients": gtp.NVFP4(grad_wire="fp8"),
}
FLAX = str(Path(flax.__file__).parent)


def under_construction(module):
    """Whether one of its `__init__` runs, or NNX is putting it together: `nnx.merge` sets attributes one by one."""
    frame = sys._getframe(2)
    by_nnx = frame.f_code.co_filename.startswith(FLAX)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return by_nnx


@pytest.fixture
def written(monkeypatch):
    """Names of the attributes that anything has written since, by type of the module."""
    found = []
    original = nnx.Module.__setattr__

    def record(self, name, value):
        if not under_construction(self) and not isinstance(self, nnx.Optimizer):
            found.append((type(self).__name__, name))
        original(self, name, value)

    monkeypatch.setattr(nnx.Module, "__setattr__", record)
    return found


def test_the_record_sees_writes_to_a_model_and_to_merged_copies(written):
    layer = gtp.Dense(16, 16, rngs=nnx.Rngs(0))
    assert not written
    layer.names = ("a",)
    nnx.clone(layer).names = ("b",)
    nnx.merge(*nnx.split(layer)).dtype = jnp.float32
    assert written == [("Dense", "names"), ("Dense", "names"), ("Dense", "dtype")]


CASES = [(name, {}) for name in EVERY] + [
    ("of modules", dict(tie_embeddings=True)),
    ("of modules", dict(num_experts=4)),
]
DEFAULT = [("of gradients", {})]


@pytest.mark.parametrize("name, changes", others_full(CASES, DEFAULT), ids=str)
def test_no_attribute_is_written_in_a_step(name, changes, written):
    recipe = EVERY[name]
    if "tie_embeddings" in changes:
        recipe = dataclasses.replace(recipe, override={"mlp.down": gtp.FP8(matmuls=True), "embed": gtp.NVFP4()})
    config = dataclasses.replace(CONFIG, **changes)
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        optimizer = optax.adamw(1e-3)
        state = gtp.TrainState.create(abstract_model(lambda rngs: Llama(config, rngs=rngs)), optimizer)
        tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
        pregathered_layers = 1 if recipe.wire is not None else 0
        step = gtp.train_step(
            next_token_loss, optimizer, microbatches=2, recipe=recipe, pregathered_layers=pregathered_layers
        )
        step.lower(state, {"tokens": tokens, "targets": tokens})  # attributes are written while Python traces
        gtp.eval_step(next_token_loss, recipe=recipe).lower(state, {"tokens": tokens, "targets": tokens})
    assert not written


def test_no_attribute_is_written_under_a_recipe_in_scope(written):
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        graph, state = nnx.split(abstract_model(lambda rngs: Llama(CONFIG, rngs=rngs)))
        loss = lambda state, tokens: gtp.cross_entropy(nnx.merge(graph, state)(tokens), tokens)[0]  # noqa: E731
        with gtp.use_recipe(EVERY["mxfp8"]):
            jax.eval_shape(jax.grad(loss), state, jnp.zeros((8, 16), jnp.int32))
    assert not written
