"""Experts whose dimensions gtp does not divide are stored padded, and train as on one device."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=26,
    num_layers=1,
    num_heads=6,
    num_kv_heads=3,
    head_dim=6,
    intermediate_size=34,
    num_experts=4,
    dtype="float64",
)
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}


@functools.cache
def trained(name, **degrees):
    """The logical parameters and the losses of two steps, and the stored shapes of padded parameters."""
    devices = jax.devices()[: math.prod(degrees.values())]
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 30, 9)).astype(np.int32)
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=devices)), gtp.even_shares():
        state = gtp.TrainState.create(gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(0)), OPTIMIZERS[name])
        step, losses = gtp.train_step(next_token_loss, OPTIMIZERS[name], view="local"), []
        for row in tokens:
            state, metrics = step(state, {"tokens": row[:, :-1], "targets": row[:, 1:]})
            losses.append(float(metrics["loss"]))
        padded = {"/".join(path): layout.array_shape for path, layout in state.model_def.padded.items()}
        return jax.tree.map(np.asarray, state.logical().params), losses, padded


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("degrees", "name"),
    [
        (dict(gtp=5), "adamw"),
        pytest.param(dict(gtp=5), "muon", marks=SLOW),
        pytest.param(dict(gtp=5), "adafactor", marks=SLOW),
        pytest.param(dict(gtp=3, ep=2), "adamw", marks=SLOW),
        (dict(gtp=3, ep=2), "muon"),
        pytest.param(dict(gtp=3, ep=2), "adafactor", marks=SLOW),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:the optimizer treats the layers")
def test_steps_of_padded_experts_are_those_of_one_device(degrees, name, x64):
    wanted, losses, _ = trained(name, gtp=1)
    found, own, padded = trained(name, **degrees)
    sizes = {5: ((4, 26, 35), (4, 35, 26)), 3: ((4, 27, 34), (4, 34, 27))}[degrees["gtp"]]
    assert (padded["blocks/layers/mlp/down/kernel"], padded["blocks/layers/mlp/up/kernel/gate"]) == sizes
    np.testing.assert_allclose(own, losses, rtol=1e-13)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12, err_msg=jax.tree_util.keystr(path))
