"""Gathers and reduce-scatters as written between processes on CPUs are the usual ones, and so are their transposes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from selection import others_full

import gtp_jax as gtp
from gtp_jax.collectives import _over_gloo, all_gather, reduce_scatter
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model

MOVES = {"gather": all_gather, "scatter": reduce_scatter}


@pytest.mark.parametrize(
    ("move", "axes", "dim"), [("gather", "gtp", 0), ("scatter", "gtp", 1), ("scatter", ("gtp", "tp"), 1)]
)
def test_both_ways_give_the_same_and_have_the_same_transpose(move, axes, dim, monkeypatch):
    spec = PartitionSpec(("gtp", "tp"))
    x = np.random.default_rng(0).normal(size=(8 * 8, 8, 3)).astype(np.float32)

    def found():
        with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
            whole = jax.shard_map(
                lambda x: MOVES[move](x, axes, dim=dim), in_specs=spec, out_specs=spec, check_vma=False
            )
            program = jax.jit(lambda x: jax.vjp(whole, x)[1](jnp.cos(whole(x))) + (whole(x),))
            return jax.tree.map(np.asarray, program(x)), program.lower(x).as_text()

    usual, text = found()
    monkeypatch.setattr(_over_gloo, "_over_gloo", lambda: True)
    other, exchanged = found()
    for one, wanted in zip(other, usual, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-6, atol=1e-6)
    assert "reduce_scatter" in text and "reduce_scatter" not in exchanged and "all_to_all" in exchanged


CASES = [(dict(dp=2, gtp=2, tp=2), "local"), (dict(gtp=2, tp=3), "global")]


@pytest.mark.parametrize(("degrees", "view"), others_full(CASES, CASES[:1]))
def test_no_reduce_scatter_is_left_in_a_step_between_processes(degrees, view, monkeypatch):
    """A vocabulary of 100 is uneven over tp 3, where global view joins logits; dp 2 divides masters (ZeRO)."""
    config = LlamaConfig(
        vocab_size=100, hidden_size=24, num_layers=1, num_heads=6, num_kv_heads=6, head_dim=4, intermediate_size=36,
        dtype="float32", unroll=1,
    )  # fmt: skip
    monkeypatch.setattr(_over_gloo, "_over_gloo", lambda: True)
    count = math.prod(degrees.values())
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[:count])):
        optimizer = optax.sgd(0.1)
        state = gtp.TrainState.create(abstract_model(lambda rngs: Llama(config, rngs=rngs)), optimizer)
        tokens = jax.ShapeDtypeStruct((4, 12), jnp.int32)
        step = gtp.train_step(next_token_loss, optimizer, view=view)
        text = step.lower(state, {"tokens": tokens, "targets": tokens}).as_text()
    assert "all_to_all" in text and "reduce_scatter" not in text
