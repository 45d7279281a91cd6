"""A model of stock Flax layers in float64 whose sizes no degree divides, and steps of it."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from padded_states import padding_of, same

import gtp_jax as gtp

from .models import F64, Attention

WIDTH, HIDDEN, VOCAB, LENGTH, BATCH = 26, 34, 37, 5, 42
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=1e-3),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}
MESHES = {"gtp 7": dict(gtp=7), "gtp 3, dp 2": dict(dp=2, gtp=3), "gtp 3, tp 2": dict(gtp=3, tp=2)}


class Block(nnx.Module):
    """A block whose feedforward layer its author has annotated with tp."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        annotated = lambda *names: nnx.with_partitioning(init, names)  # noqa: E731
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, **F64)
        # without a bias: the gradient of that of keys is zero except for rounding, which optimizers may normalize
        self.attention = Attention(rngs, WIDTH, (2, 13), use_bias=False)
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=annotated(None, "tp"), rngs=rngs, **F64)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=annotated("tp", None), rngs=rngs, **F64)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    """A tied head, positions that the model holds itself, blocks that share a layer, and a layer outside of blocks."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **F64)
        self.positions = nnx.Param(0.5 * jax.random.normal(rngs.params(), (LENGTH, WIDTH), jnp.float64))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.blocks[1].attention.out = self.blocks[0].attention.out
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.last(x))


class Stacked(nnx.Module):
    """Five layers with stacked weights, which a scan slices."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **F64)

        @nnx.split_rngs(splits=5)
        @nnx.vmap
        def layers(rngs):
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)

        self.layers = layers(rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x, layer):
            return x + jnp.tanh(layer(x))

        return self.embed.attend(through(self.embed(tokens), self.layers))


def batches(count: int = 2) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(0, VOCAB, (BATCH, LENGTH))) for _ in range(count)]


def loss(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(jnp.sin(3 * model(tokens))), jnp.asarray(float(tokens.size))


@contextlib.contextmanager
def on(**degrees: int):
    """A mesh of the first devices, under `even_shares`."""
    count = math.prod(degrees.values())
    with jax.set_mesh(gtp.make_mesh(**{"gtp": 1, **degrees}, devices=jax.devices()[:count])), gtp.layout.even_shares():
        yield


def blocks_of(kind: type) -> str:
    return "layers" if kind is Stacked else "blocks.*"


def sharded(rngs: nnx.Rngs, kind: type = Model, **options: Any) -> nnx.Module:
    return gtp.shard(kind(rngs), blocks_of(kind), **{"min_size": 80, **options})


@functools.cache
def _drawn(kind: type, seed: int) -> tuple[Any, Any]:
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])), nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.jit(lambda: kind(nnx.Rngs(seed)))())
        return graph, jax.tree.map(np.asarray, state)


def make(kind: type = Model, seed: int = 0, **options: Any) -> nnx.Module:
    """A sharded model, whose arrays are drawn once for all meshes."""
    graph, state = _drawn(kind, seed)
    with nnx.use_eager_sharding(False):
        model = nnx.merge(graph, jax.device_put(state))
    return gtp.shard(model, blocks_of(kind), **{"min_size": 80, **options})


@functools.cache
def trained(
    name: str, degrees: tuple[tuple[str, int], ...] = (), kind: type = Model, shard: Any = (), **options: Any
) -> tuple[Any, Any, dict[str, tuple[int, ...]]]:
    """The logical state and the metrics of two steps, and the stored shapes of parameters."""
    with on(**dict(degrees)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the optimizer treats the layers")
        state = gtp.TrainState.create(make(kind, **dict(shard)), OPTIMIZERS[name])
        step, found = gtp.train_step(loss, OPTIMIZERS[name], max_grad_norm=0.5, **options), []
        for tokens in batches():
            state, metrics = step(state, tokens)
            found.append([float(metrics[key]) for key in ("loss", "grad_norm")])
        assert not padding_of(state).any()
        shapes = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(state.params)}
        logical = state.logical()
        return jax.tree.map(np.asarray, (logical.params, logical.opt_state)), found, shapes


def assert_same_steps(
    name: str, mesh: str, *, kind: type = Model, recipe: Any = None, atol: float = 1e-12, **options: Any
) -> dict[str, tuple[int, ...]]:
    """Checks that two steps on a mesh are those of one device, and returns the stored shapes of parameters."""
    wanted, losses, _ = trained(name, kind=kind, recipe=recipe)
    found, own, shapes = trained(name, tuple(MESHES[mesh].items()), kind=kind, recipe=recipe, **options)
    np.testing.assert_allclose(own, losses, rtol=atol if recipe is None else 10 * atol)
    same(found, wanted, atol)
    return shapes
