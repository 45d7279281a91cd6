"""The same Llama on this machine's GPUs and in stock Flax on its CPU."""

import dataclasses

import jax
import pytest

from .test_llama_parity import UNALIGNED, assert_close, batches, oracle, train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tp", [1, 2])
def test_gpus_agree_with_the_plain_model_in_float32(tp):
    if jax.device_count() % tp:
        pytest.skip(f"{jax.device_count()} GPUs do not divide by tp = {tp}")
    config = dataclasses.replace(UNALIGNED, dtype="float32")
    data = batches(config, 8, 8)
    with jax.default_matmul_precision("highest"):  # else Hopper multiplies float32 in TF32
        start, gradient, losses, _ = train(config, dict(gtp=jax.device_count() // tp, tp=tp), data, rate=1e-3)
        wanted_gradient, wanted_losses, _ = oracle(config, start, data, rate=1e-3)
    assert_close(gradient, wanted_gradient, 1e-5, "gradient of ")
    assert_close(losses, wanted_losses, 1e-5, "loss of step ")


def test_gpus_agree_with_the_plain_model_in_bfloat16():
    """Aligned sizes, so that cuDNN takes the attention; against float32, as far off as eight bits allow."""
    sizes = dict(vocab_size=1024, hidden_size=256, num_heads=4, head_dim=64, intermediate_size=512)
    config = dataclasses.replace(UNALIGNED, **sizes, dtype="bfloat16")
    data = batches(config, 8, 128)
    start, gradient, losses, _ = train(config, dict(gtp=jax.device_count()), data, rate=1e-3)
    with jax.default_matmul_precision("highest"):
        plain = dataclasses.replace(config, dtype="float32")
        wanted_gradient, wanted_losses, _ = oracle(plain, start, data, rate=1e-3)
    assert_close(gradient, wanted_gradient, 5e-2, "gradient of ")
    assert_close(losses, wanted_losses, 5e-3, "loss of step ")
