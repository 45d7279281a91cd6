"""Bugs that Megatron-LM's GTP has had, and which test here fails if we have them.

| upstream | bug | here |
|---|---|---|
| #6388 | a gather reads weights before data parallelism has published them | tests/train/test_zero.py, `test_losses_gradients_and_steps_are_those_of_stock_flax`: the loss of a step is that of weights updated in the step before, on other ranks of dp; `test_optimizers_agree_with_one_device` |
| #6202, #6207, #6407 | a buffer is reused by a neighbour of the same shape | tests/chain/test_stack_is_a_loop.py, `test_a_stack_computes_what_a_loop_over_its_layers_does`: layers of one shape and of other values, for each schedule |
| #6080 | gradients of experts are wrong for EP = 1, EP = TP, or experts sharded otherwise than the rest | tests/experts/test_grouped_dense.py, `test_gradients_are_those_of_a_matmul_an_expert`: experts on all ranks, divided over tp, and sharded over (dp, gtp) and (tp, gtp) |
| #6717 | the loss of an evaluation is not averaged over gtp | `test_evaluation_is_the_mean_over_all_tokens_of_all_ranks` below |
| #6569 | one seed on all ranks, which drop the same places | tests/nn/test_attention_views.py, `test_ranks_with_other_examples_or_heads_drop_others`; tests/chain/test_stack_on_a_mesh.py, `test_batch_statistics_and_masks_on_a_mesh_are_those_without` |
| #6740 | Muon orthogonalizes padding along with a weight | tests/train/test_zero.py, `test_optimizers_agree_with_one_device` (muon; sizes that shards do not divide); storage is logical, so that an optimizer never sees padding: `test_every_device_stores_its_part_of_masters_and_moments` |
| #6503 | checkpoints of gated layers | tests/checkpoint/test_checkpoints_meshes.py: gate and up of every mesh on every other, bit for bit |
"""  # noqa: E501

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=16,
    dtype="float64",
)


def test_evaluation_is_the_mean_over_all_tokens_of_all_ranks(key, x64):
    """Ranks have other numbers of tokens, and one of them has none; a mean of their means would be another number."""
    tokens = jax.random.randint(key, (8, 7), 0, CONFIG.vocab_size)
    weights = jnp.asarray([[row < 6 and column <= row for column in range(6)] for row in range(8)], jnp.float64)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    found = []
    for degrees in (None, dict(dp=2, gtp=4)):
        with jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else contextlib.nullcontext():
            model = gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(1))
            state = gtp.TrainState.create(model, optax.sgd(1.0))
            metrics = gtp.eval_step(next_token_loss)(state, batch)
            logits = None if degrees else np.asarray(model(batch["tokens"]))
        found.append((float(metrics["loss"]), float(metrics["tokens"]), logits))
    (plain, count, logits), (loss, same_count, _) = found
    assert logits is not None
    chosen = np.take_along_axis(logits, np.asarray(batch["targets"])[..., None], -1)[..., 0]
    wanted = np.log(np.exp(logits).sum(-1)) - chosen
    np.testing.assert_allclose(plain, (wanted * weights).sum() / weights.sum(), rtol=1e-12)
    np.testing.assert_allclose(loss, plain, rtol=1e-12)
    assert count == same_count == weights.sum() == 21
