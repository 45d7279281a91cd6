"""Layers that dropout, batch norm and an auxiliary loss are a part of, in a `Stack` and in a plain Python loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gtp_jax as gtp

FEATURES = 6
WIDE = dict(dtype=jnp.float64, param_dtype=jnp.float64)


class Block(nnx.Module):
    """Uses every kind of input and output that a layer has."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = gtp.Dense(FEATURES, FEATURES, rngs=rngs, **WIDE)
        self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs, **WIDE)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)
        self.balance = gtp.nn.AuxLoss(jnp.zeros((), jnp.float64))
        self.norm_of_output = gtp.nn.Metric(jnp.zeros((), jnp.float64))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x, positions, *, mask, memory, causal=True):
        h = self.dropout(self.norm(self.dense(x)))
        h = h + jnp.sin(positions.astype(x.dtype) / 10)[:, :, None] + x[:, :1] * memory
        y = x + jnp.where(mask[:, :, None], jnp.tanh(h), 0) * (1.0 if causal else 2.0)
        self.balance.set_value(jnp.mean(jnp.square(h)))
        self.norm_of_output.set_value(jnp.linalg.norm(y))
        self.calls.set_value(self.calls.get_value() + 1)
        return y


class Looped(nnx.Module):
    """The layers of a stack, one after another, without a chain."""

    def __init__(self, stack: gtp.Stack):
        graph, state = nnx.split(stack.layers)
        self.layers = nnx.List(
            nnx.merge(graph, jax.tree.map(lambda a, layer=layer: a[layer], state)) for layer in range(stack.length)
        )

    def __call__(self, x, *shared, **named):
        for layer in self.layers:
            x = layer(x, *shared, **named)
        return x


def make_stack(length: int, **options) -> gtp.Stack:
    return gtp.Stack(lambda rngs: Block(rngs), length, rngs=nnx.Rngs(params=0, dropout=1), **options)


def inputs(batch: int = 4, seq: int = 3):
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.normal(size=(batch, seq, FEATURES)))
    positions = jnp.asarray(rng.integers(0, 50, (batch, seq)), jnp.int32)
    mask = jnp.asarray(rng.random((batch, seq)) > 0.2)
    memory = jnp.asarray(rng.normal(size=(batch, seq, FEATURES)))
    return x, positions, mask, memory


def loss(model, x, positions, mask, memory):
    """A loss with the auxiliary ones in it, twice, so that state goes from call to call."""
    y = model(x, positions, mask=mask, memory=memory, causal=False)
    y = model(y, positions, mask=mask, memory=memory)
    aux = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(nnx.state(model, gtp.nn.AuxLoss)))
    return jnp.sum(y**2) + 0.3 * aux


def results(model, arguments):
    """Loss, gradients and the variables afterwards, by path, of each layer stacked."""
    differentiated = nnx.DiffState(0, nnx.Param)
    found = nnx.jit(nnx.value_and_grad(loss, argnums=(differentiated, 1, 4)))(model, *arguments)
    value, (gradient, to_x, to_memory) = found
    return float(value), by_path(model, gradient), by_path(model, nnx.state(model)), to_x, to_memory


def by_path(model, state) -> dict[str, np.ndarray]:
    """Arrays of a state of either, stacked, by path within a layer."""
    found: dict[str, list[np.ndarray]] = {}
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        value = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
        inner = path[2:] if isinstance(model, Looped) else path[1:]
        found.setdefault(".".join(map(str, inner)), []).append(np.asarray(value))
    return {path: np.stack(parts) if isinstance(model, Looped) else parts[0] for path, parts in found.items()}


def assert_equal(found, wanted) -> None:
    assert found[0] == wanted[0] or abs(found[0] - wanted[0]) <= 1e-12 * abs(wanted[0])
    for one, other in zip(found[1:3], wanted[1:3], strict=True):
        assert one.keys() == other.keys()
        for path in one:
            assert one[path].dtype == other[path].dtype, path
            assert_close(one[path], other[path], path)
    for name, one, other in zip(("x", "memory"), found[3:], wanted[3:], strict=True):
        assert_close(np.asarray(one), np.asarray(other), name)


def assert_close(one: np.ndarray, other: np.ndarray, what: str) -> None:
    if not np.issubdtype(one.dtype, np.floating):
        np.testing.assert_array_equal(one, other, err_msg=what)
        return
    assert np.linalg.norm(one - other) <= 1e-12 * max(np.linalg.norm(other), 1), what
