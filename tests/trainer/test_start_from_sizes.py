"""A run starts from the parameters of a checkpoint whose model has the sizes of its own."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import LlamaConfig, saved
from gtp_jax.runner.trainer._start import check_start

MODEL = LlamaConfig(
    vocab_size=97, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, intermediate_size=16
)


def test_the_same_sizes_are_accepted_and_others_refused_by_name(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        model = gtp.init(lambda rngs: gtp.Dense(2, 2, rngs=rngs), nnx.Rngs(0))
        checkpoints.save(1, gtp.TrainState.create(model, optax.sgd(1.0)), extra=saved(MODEL))
    check_start(tmp_path, MODEL)
    with pytest.raises(ValueError, match="than this run's:\n  vocab_size: 97 there, 128 here\nNo --preset"):
        check_start(tmp_path, dataclasses.replace(MODEL, vocab_size=128))


@pytest.mark.parametrize("extra", [{}, {"model": "tiny"}])
def test_a_checkpoint_that_does_not_name_its_model_is_refused(tmp_path, extra):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, extra=extra)
    with pytest.raises(ValueError, match="does not say of which model it is, so that a run cannot start from it"):
        check_start(tmp_path, MODEL)
