"""Modules in a row, heads and losses called alone: sharded as unsharded, joined as one after the other."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax import hlo

WIDE = dict(dtype=jnp.float64, param_dtype=jnp.float64)


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.mlp = gtp.MLP(24, 40, rngs=rngs, **WIDE)

    def __call__(self, x):
        return x + self.mlp(x)


class Two(nnx.Module):
    """An embedding, two stacks with policies of their own, a layer between, a head tied to the embedding."""

    def __init__(self, rngs):
        self.embed = gtp.Embed(40, 24, rngs=rngs, **WIDE)
        self.first = gtp.Stack(lambda rngs: Residual(rngs), 2, remat="everything", rngs=rngs)
        self.between = gtp.MLP(24, 52, gated=False, norm="layer", rngs=rngs, **WIDE)
        self.second = gtp.Stack(lambda rngs: Residual(rngs), 1, remat="nothing", rngs=rngs)
        self.head = gtp.TiedHead(self.embed, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, tokens, joined=True):
        row = (self.embed, self.first, self.between, self.second, self.head)
        if joined:
            return gtp.run_chain(tokens, *row)
        x = tokens
        for module in row:
            x = module(x)
        return x


def loss_and_gradients(degrees, joined, tokens, targets):
    mesh = gtp.make_mesh(**degrees) if degrees else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        state = gtp.init(Two, nnx.Rngs(5))
        graph, params = nnx.split(state)

        def loss(params):
            total, count = gtp.cross_entropy(nnx.merge(graph, params)(tokens, joined), targets)
            return total / count

        value, gradient = jax.jit(jax.value_and_grad(loss))(params)
        return float(value), [np.asarray(v.get_value()) for v in _variables(gradient)]


def _variables(state):
    return jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Variable))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [dict(gtp=8), dict(dp=2, gtp=2, tp=2)], ids=str)
def test_a_row_under_plain_jit_is_the_modules_one_after_the_other(degrees, key, x64):
    tokens, targets = jax.random.randint(key, (2, 8, 6), 0, 40)
    wanted, gradients = loss_and_gradients(None, False, tokens, targets)
    for joined in (True, False):
        found, own = loss_and_gradients(degrees, joined, tokens, targets)
        assert found == pytest.approx(wanted, rel=1e-13)
        for a, b in zip(own, gradients, strict=True):
            assert np.linalg.norm(a - b) <= 1e-12 * np.linalg.norm(b)


@pytest.mark.skipif(bool(hlo.missing_packages()), reason="compiling for H200 needs the `target` extra")
@pytest.mark.parametrize("tp", [1, 2])
def test_no_wide_copy_of_the_logits_is_made_on_gpus(tp):
    P = jax.sharding.PartitionSpec
    mesh = gtp.make_mesh(gtp=8 // tp, tp=tp, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    with jax.set_mesh(mesh):
        place = lambda *spec: jax.sharding.NamedSharding(mesh, P(*spec))  # noqa: E731
        logits = jax.ShapeDtypeStruct((8, 2048, 32768), jnp.bfloat16, sharding=place(("dp", "gtp"), None, "tp"))
        targets = jax.ShapeDtypeStruct((8, 2048), jnp.int32, sharding=place(("dp", "gtp")))
        loss = jax.jit(jax.value_and_grad(lambda logits, targets: gtp.cross_entropy(logits, targets)[0]))
        compiled = loss.lower(logits, targets).compile(compiler_options=dict(hlo.COMPILE_OPTIONS))
    ours = 2 * 8 * 2048 * 32768 // 8
    assert compiled.memory_analysis().temp_size_in_bytes < ours / 20
