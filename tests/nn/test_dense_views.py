"""Every module under plain `jax.jit` in global view: value and gradients are those without a mesh."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp

FEATURES, OUT = 56, 120  # neither is a multiple of gtp * 16
F64 = dict(dtype=jnp.float64, param_dtype=jnp.float64)
NAMED = {"query": 56, "key": 20}
ALIGNED = {
    "a": 256,
    "b": 512,
}  # of which every rank's rows are whole blocks, and lie rank after rank in the fused weight

MODULES = {
    "column": lambda **o: gtp.Dense(FEATURES, OUT, parallel="column", use_bias=True, **o),
    "row": lambda **o: gtp.Dense(FEATURES, OUT, parallel="row", use_bias=True, **o),
    "whole": lambda **o: gtp.Dense(FEATURES, OUT, use_bias=True, **o),
    "several kernels": lambda **o: gtp.Dense(FEATURES, NAMED, parallel="column", use_bias=True, **o),
    "several kernels in blocks": lambda **o: gtp.Dense(FEATURES, ALIGNED, parallel="column", **o),
    "several whole kernels": lambda **o: gtp.Dense(FEATURES, NAMED, **o),
    "rms norm": lambda **o: gtp.nn.LayerNormDense(FEATURES, OUT, **o),
    "layer norm": lambda **o: gtp.nn.LayerNormDense(FEATURES, NAMED, norm="layer", use_bias=True, **o),
    "mlp": lambda **o: gtp.MLP(FEATURES, OUT, use_bias=True, **o),
    "plain mlp": lambda **o: gtp.MLP(FEATURES, OUT, gated=False, activation=jnp.tanh, norm=None, **o),
    "attention": lambda **o: gtp.Attention(FEATURES, num_heads=8, num_kv_heads=4, head_dim=14, **o),
    "embed": lambda **o: gtp.Embed(1000, FEATURES, **o),
    "stack": lambda **o: gtp.Stack(
        lambda rngs: gtp.MLP(FEATURES, OUT, **{**o, "rngs": rngs}),
        3,
        sequence_parallel=o["sequence_parallel"],
        rngs=o["rngs"],
    ),
}
MESHES = {
    "gtp 4 x tp 2, sequence parallel": (dict(gtp=4, tp=2), True),
    "gtp 2 x tp 4, sequence parallel": (dict(gtp=2, tp=4), True),
    "dp 2 x gtp 2 x tp 2, whole sequence": (dict(dp=2, gtp=2, tp=2), False),
}


def logical(state) -> dict:
    """A state's arrays by path, on the host."""
    return {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(state)}


@functools.cache
def measured(name: str, mesh: str | None):
    """Parameters, output, loss and gradients; an ordinary function of the module under `jax.jit`."""
    degrees, sequence_parallel = MESHES[mesh] if mesh else (None, True)
    rng = np.random.default_rng(len(name))
    x = rng.integers(0, 1000, (8, 8)) if name == "embed" else rng.normal(size=(8, 8, FEATURES))
    with jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else contextlib.nullcontext():
        make = lambda rngs: MODULES[name](rngs=rngs, sequence_parallel=sequence_parallel, **F64)  # noqa: E731
        graph, state = nnx.split(gtp.init(make, nnx.Rngs(5)))
        if degrees:  # the test would be worth nothing on whole arrays
            weights = [v.get_value() for _, v in nnx.to_flat_state(state) if "layout" in v.get_metadata()]
            assert all(w.addressable_shards[0].data.size < w.size for w in weights)

        def loss(state, x):
            outputs = nnx.merge(graph, state)(x)
            return sum(jnp.sum(jnp.sin(3 * y)) for y in jax.tree.leaves(outputs)), outputs

        wanted = 0 if name == "embed" else (0, 1)
        (value, outputs), gradients = jax.jit(jax.value_and_grad(loss, wanted, has_aux=True))(state, jnp.asarray(x))
        of_state, of_x = (gradients, ()) if name == "embed" else gradients
        return jax.tree.map(np.asarray, (logical(state), value, outputs, logical(of_state), of_x))


# every mesh and what is fused by default
DEFAULT = [
    ("column", "gtp 4 x tp 2, sequence parallel"),
    ("layer norm", "gtp 4 x tp 2, sequence parallel"),
    ("plain mlp", "gtp 2 x tp 4, sequence parallel"),
    ("embed", "dp 2 x gtp 2 x tp 2, whole sequence"),
    ("several kernels in blocks", "gtp 4 x tp 2, sequence parallel"),
]


@pytest.mark.parametrize("name, mesh", others_full([(name, mesh) for name in MODULES for mesh in MESHES], DEFAULT))
def test_module_in_global_view_equals_itself_without_a_mesh(name, mesh, x64):
    params, *plain = measured(name, None)
    same, *found = measured(name, mesh)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    assert plain[1] is not None and all(np.abs(g).max() > 0 for g in plain[2].values())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, np.abs(b).max()))


def test_replaced_weight_is_the_one_used(x64):
    """Upstream's conformance line 4a: a kernel put there later takes part like the first."""
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        module = gtp.init(lambda rngs: gtp.Dense(FEATURES, OUT, rngs=rngs, **F64), nnx.Rngs(0))
        kernel = jnp.asarray(np.random.default_rng(0).normal(size=(FEATURES, OUT)))
        module.kernel.set_value(kernel)
        x = jnp.asarray(np.random.default_rng(1).normal(size=(8, FEATURES)))
        graph, state = nnx.split(module)
        y = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        np.testing.assert_allclose(y(state, x), np.asarray(x) @ np.asarray(kernel), rtol=0, atol=1e-12)
