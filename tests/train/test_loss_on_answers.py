"""The loss on answers is the mean over those of the whole batch, however ranks and microbatches divide them.

Bugs that Megatron-LM's GTP has had, and the tests here that fail if we have them:
    #6717, an evaluation's loss is not averaged over gtp: `test_the_loss_is_the_sum_over_answers_...` below
    #6388, a gather reads weights before dp has published them: tests/train/test_zero.py
    #6740, Muon orthogonalizes padding: tests/train/test_zero.py and `test_of_padded_weights_...` in test_per_layer.py
    #6202, #6207, #6407, a neighbour of the same shape reuses a buffer: tests/chain/test_stack_is_a_loop.py
    #6569, ranks drop the same places: tests/nn/test_attention_views.py, tests/chain/test_stack_on_a_mesh.py
    #6080, gradients of experts: tests/experts/test_grouped_dense.py
    #6503, checkpoints of gated layers: tests/checkpoint/test_checkpoints_meshes.py
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from placed import placed

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

SIZES = dict(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, intermediate_size=32)
CONFIG = LlamaConfig(**SIZES, dtype="float64")
ROWS, LENGTH = 16, 8


def llama(rngs: nnx.Rngs) -> Llama:
    return Llama(CONFIG, rngs=rngs)


def answers() -> np.ndarray:
    """How many tokens of each row are answers: microbatches of 4 and ranks of 8 differ in it, and one rank has none."""
    counts = np.array([0, 1, 2, 8, 0, 5, 3, 7, 1, 0, 6, 8, 2, 4, 0, 0])
    by_microbatch, by_rank = counts.reshape(-1, 4).sum(axis=0), counts.reshape(8, -1).sum(axis=1)
    assert len(set(by_microbatch)) == 4 and len(set(by_rank)) > 4 and min(by_rank) == 0
    return counts


def batch() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTH + 1)).astype(np.int32)
    counted = np.arange(LENGTH) >= LENGTH - answers()[:, None]
    return {"tokens": tokens[:, :-1], "targets": np.where(counted, tokens[:, 1:], -1).astype(np.int32)}


def computed(degrees: dict[str, Any], **options):
    """The loss, the number of tokens and the parameters behind a step."""
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        state = gtp.TrainState.create(placed(llama), optax.sgd(1.0))
        state, metrics = gtp.train_step(next_token_loss, optax.sgd(1.0), **options)(state, batch())
        return float(metrics["loss"]), float(metrics["tokens"]), jax.tree.map(np.asarray, state.params)


@functools.cache
def on_one_device():
    return computed(dict(gtp=1, devices=jax.devices()[:1]), view="global")


@pytest.mark.full
@pytest.mark.parametrize("view, microbatches", itertools.product(["local", "global"], [4, 1]))
def test_a_sharded_step_is_that_of_one_device(view, microbatches, x64):
    loss, tokens, params = on_one_device()
    found = computed(dict(gtp=2, tp=2, dp=1, devices=jax.devices()[:4]), view=view, microbatches=microbatches)
    np.testing.assert_allclose(found[0], loss, rtol=1e-12)
    assert found[1] == tokens == answers().sum()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), found[2], params)


def test_the_loss_is_the_sum_over_answers_divided_by_their_number_in_training_and_evaluation(x64):
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        model = placed(llama)
        logits = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, batch()["tokens"]))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=-1)) - np.take_along_axis(
        shifted, np.maximum(batch()["targets"], 0)[..., None], axis=-1
    ).squeeze(-1)
    counted = batch()["targets"] >= 0
    assert counted.sum() == answers().sum()
    np.testing.assert_allclose(on_one_device()[0], losses[counted].mean(), rtol=1e-12)
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        state = gtp.TrainState.create(placed(llama), optax.sgd(1.0))
        metrics = gtp.eval_step(next_token_loss)(state, batch())
    np.testing.assert_allclose(metrics["loss"], losses[counted].mean(), rtol=1e-12)
    assert metrics["tokens"] == counted.sum()
