"""What `gtp.explain` says of layers that keep activations in the host's memory: bytes, and the break-even."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import build, preset_of
from gtp_jax.nn import abstract_model

SEQ = 8192
MB = 1e6


def facts(preset="1b", remat="offload", mesh=None, rows=1, seq=SEQ, call=None, **changes):
    """The facts of a model with four layers, of its whole sequences on `rows` rows."""
    config = dataclasses.replace(preset_of(preset), num_layers=4, remat=remat, **changes)
    mesh = mesh or {"gtp": 1}
    with jax.set_mesh(gtp.make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())])):
        model = abstract_model(lambda rngs: build(config, rngs=rngs))
        tokens = np.zeros((rows, seq), np.int32)
        return config, gtp.explain(model, call=call or (lambda model: model(tokens)))


# Bytes of a layer, and nanoseconds of its forward pass, as compiled for an H200 (docs/layers.md).
COMPILED = {
    ("1b", "offload"): (33.6 * MB, 1.53),
    ("1b", "offload-matmuls"): (403 * MB, 1.53),
    ("8b", "offload"): (67.1 * MB, 5.24),
    ("8b", "offload-attention"): (135 * MB, 5.24),
    ("8b", "offload-matmuls"): (772 * MB, 5.24),
}


@pytest.mark.parametrize(("preset", "remat"), others_full(COMPILED, [("1b", "offload"), ("8b", "offload-matmuls")]))
def test_bytes_and_operations_of_a_layer_are_those_of_the_program_compiled_for_a_gpu(preset, remat):
    config, found = facts(preset, remat)
    (fact,) = found.offloads
    size, milliseconds = COMPILED[preset, remat]
    assert (fact.stack, fact.remat, fact.layers, fact.chip) == ("blocks", remat, 4, "h200")
    assert fact.bytes == pytest.approx(size, rel=2e-3)
    sizes = dict(seq=SEQ, heads=config.num_heads, head_dim=config.head_dim)
    of_layer = (config.matmul_params() - config.vocab_size * config.hidden_size) // 4
    assert 3 * fact.flops == hlo.step_flops(matmul_params=of_layer, tokens=SEQ, layers=1, **sizes)
    assert fact.flops / 787e12 == pytest.approx(milliseconds / 1e3, rel=2e-2)
    assert f"break-even: a layer's {hlo.quantity(fact.bytes, 'B')} take " in str(found)


@pytest.mark.parametrize("remat", [pytest.param("offload", marks=pytest.mark.full), "offload-matmuls"])
def test_devices_share_bytes_and_operations(remat):
    (whole,) = facts("tiny", remat, seq=64)[1].offloads
    (part,) = facts("tiny", remat, {"gtp": 2, "tp": 2}, rows=2, seq=64)[1].offloads
    assert (2 * part.bytes, 2 * part.flops) == (whole.bytes, whole.flops)
    (each,) = facts("tiny", remat, {"tp": 2}, seq=64, sequence_parallel=False)[1].offloads
    assert each.flops == whole.flops / 2
    assert whole.bytes / 2 < each.bytes <= whole.bytes


@pytest.mark.full
def test_in_a_chain_of_global_arrays_the_input_counts_as_it_is_divided():
    """Further inputs keep a chain out of one `shard_map`, so that shapes are global."""

    def packed(model):
        return model(jnp.zeros((2, 64), jnp.int32), segment_ids=jnp.zeros((2, 64), jnp.int32))

    mesh = {"gtp": 2, "tp": 2}
    (alone,) = facts("tiny", "offload", mesh, rows=2, seq=64)[1].offloads
    (fact,) = facts("tiny", "offload", mesh, call=packed)[1].offloads
    assert fact == alone
    (alone,) = facts("tiny", "offload-matmuls", mesh, rows=2, seq=64)[1].offloads
    (fact,) = facts("tiny", "offload-matmuls", mesh, call=packed)[1].offloads
    assert fact.flops == alone.flops and alone.bytes <= fact.bytes <= 2 * alone.bytes


class TwoStacks(nnx.Module):
    def __init__(self, rngs):
        def layers(remat):
            return gtp.Stack(lambda rngs: gtp.MLP(32, 64, rngs=rngs), 2, remat=remat, rngs=rngs)

        self.first, self.second, self.third = map(layers, ("offload", "matmuls", "offload-matmuls"))

    def __call__(self, x):
        return self.third(self.second(self.first(x)))


def test_every_stack_that_offloads_is_named_and_no_other(x64):
    model = TwoStacks(nnx.Rngs(0))
    x = jnp.zeros((2, 8, 32), "float32")
    found = gtp.explain(model, call=lambda model: model(x)).offloads
    assert [(fact.stack, fact.remat) for fact in found] == [("first", "offload"), ("third", "offload-matmuls")]
    assert found[0].bytes == 2 * 8 * 32 * 4 < found[1].bytes
    assert found[0].flops == found[1].flops == 2 * 16 * 3 * 32 * 64
    assert gtp.explain(model).offloads == ()
    assert "break-even" not in str(gtp.explain(model.second, call=lambda model: model(x)))
    assert model.first.layers.__dict__.keys() == model.second.layers.__dict__.keys()  # the model is not changed


def test_experts_count_as_often_as_a_token_reaches_them():
    stack = gtp.Stack(
        lambda rngs: gtp.nn.MoE(32, 64, num_experts=8, top_k=2, rngs=rngs), 2, remat="offload", rngs=nnx.Rngs(0)
    )
    (fact,) = gtp.explain(stack, call=lambda model: model(jnp.zeros((2, 8, 32)))).offloads
    assert (fact.stack, fact.flops) == ("the model", 2 * 16 * 2 * 3 * 32 * 64)


def test_a_window_to_both_sides_counts_on_both_sides():
    def flops(causal, window):
        def layer(rngs):
            return gtp.Attention(32, num_heads=4, causal=causal, window=window, rngs=rngs)

        stack = gtp.Stack(layer, 2, remat="offload", rngs=nnx.Rngs(0))
        (fact,) = gtp.explain(stack, call=lambda model: model(jnp.zeros((1, 64, 32)))).offloads
        return fact.flops

    weights = 2 * 64 * 4 * 32 * 32
    assert flops(True, 8) - weights == 4 * 64 * 8 * 32
    assert flops(False, 8) - weights == 4 * 64 * 15 * 32
    assert flops(False, 64) == flops(False, None)


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_blocks_of_a_stock_model_that_offload_are_one_row_with_the_bytes_of_a_device(x64):
    x = jnp.zeros((8, 16, 32), jnp.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(Blocks(nnx.Rngs(0)), min_size=64, remat="offload")
        found = gtp.explain(model, call=lambda model: model(x))
    (fact,) = found.offloads
    # the input of the first comes from outside, and the last, whose backward follows, keeps its own
    assert (fact.stack, fact.remat, fact.layers) == ("layers.*", "offload", 2)
    assert (fact.bytes, fact.flops) == (16 * 32 * 4, 2 * 16 * 32 * 32)
    assert "break-even" in str(found)
