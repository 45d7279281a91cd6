"""What depth costs: a shard and an activation a layer, never a gathered weight."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from selection import pairwise

import gtp_jax as gtp
from gtp_jax.inspect._offload import _as_on_gpus
from gtp_jax.models import LlamaConfig

from .programs import lowered_step


@pytest.mark.slow
@pytest.mark.parametrize("unroll", ["full", 1])
def test_each_recomputation_policy_keeps_less_than_the_next(unroll):
    sizes = dict(
        vocab_size=256, hidden_size=128, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=384
    )

    def temporary(remat):
        config = LlamaConfig(**sizes, remat=remat, unroll=unroll)
        step = lowered_step(config, gtp.make_mesh(gtp=4, tp=2), batch=4, seq=256, gradients=True)
        return step.compile().memory_analysis().temp_size_in_bytes

    nothing, matmuls, activations, everything = map(temporary, ("nothing", "matmuls", "activations", "everything"))
    assert nothing < 0.8 * matmuls and activations < 0.6 * everything
    # one number in bfloat16 of each hidden feature of a rank's tokens, in every layer, less what may be gone by then
    made = 6 * (4 * 256 // 4) * (384 // 2) * 2
    assert 0.5 * made < activations - matmuls < 1.2 * made


@pytest.mark.parametrize("kept, unroll", pairwise([(1, 1), ("all", 3), (0, 0)], ["full", 1], usual=2))
def test_forward_hands_backward_only_the_weights_it_keeps(kept, unroll):
    keep_gathered, whole = kept
    schedule = gtp.nn.Schedule(keep_gathered=keep_gathered, unroll=unroll)
    found = []
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        make = lambda rngs: gtp.Stack(lambda rngs: gtp.Dense(128, 128, rngs=rngs), 3, schedule=schedule, rngs=rngs)  # noqa: E731
        graph, state = nnx.split(gtp.nn.abstract_model(make))

        def local(state, x):
            y, backward = jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)
            found.extend(leaf.shape for leaf in jax.tree.leaves(backward))
            return y

        specs = P(None, None, "gtp")
        mapped = jax.shard_map(local, in_specs=(specs, P("gtp")), out_specs=P("gtp"), check_vma=False)
        jax.eval_shape(mapped, state, jax.ShapeDtypeStruct((8, 2, 128), jnp.bfloat16))
    layers = [shape[0] if len(shape) == 3 else 1 for shape in found if shape[-2:] == (128, 128)]
    assert sum(layers) == whole


ROWS = 1024  # from which on rows with documents are packed
INPUT = ((1, ROWS, 256), "bfloat16")
OUTPUT = ((1, ROWS, 2, 128), "bfloat16")
LOG_SUM_EXP = ((1, 2, ROWS), "float32")
FUSED = {"in cuDNN": {}, "of documents": {}, "in FP8": {}, "written out": dict(soft_cap=20.0)}


@pytest.mark.parametrize("kind", FUSED)
def test_the_policy_attention_keeps_the_input_the_output_of_attention_and_its_log_sum_exp(kind):
    recipe = gtp.FP8(matmuls=True, attention=True) if kind == "in FP8" else None
    sizes = dict(num_heads=2, num_kv_heads=1, head_dim=128, **FUSED[kind])
    ids = jnp.zeros((1, ROWS), jnp.int32) if kind == "of documents" else None
    mesh = gtp.make_mesh(gtp=1, devices=jax.devices()[:1])

    def kept(remat):
        make = lambda rngs: gtp.Stack(lambda rngs: gtp.Attention(256, **sizes, rngs=rngs), 3, remat=remat, rngs=rngs)  # noqa: E731
        with jax.set_mesh(mesh), _as_on_gpus(), gtp.use_recipe(recipe):
            graph, params, others = nnx.split(gtp.nn.abstract_model(make), nnx.Param, ...)

            def residuals(params, others, x):
                _, back = jax.vjp(lambda p, x: nnx.merge(graph, p, others)(x, segment_ids=ids), params, x)
                return [leaf for leaf in jax.tree.leaves(back) if ROWS in leaf.shape]

            found = jax.eval_shape(residuals, params, others, jax.ShapeDtypeStruct(*INPUT))
        return Counter((leaf.shape, leaf.dtype.name) for leaf in found if leaf.dtype != jnp.int32)

    fused = [] if kind == "written out" else [OUTPUT, LOG_SUM_EXP]
    assert kept("attention") == Counter(3 * [INPUT, *fused]) == kept("offload-attention")
    assert kept("nothing") == Counter(3 * [INPUT])
    assert kept("matmuls") >= kept("attention")


class Adapted(nnx.Module):
    """Its base has two kernels, so that what is gathered has another shape than what is stored."""

    def __init__(self, rngs):
        self.base = gtp.Dense(128, {"a": 128, "b": 64}, rngs=rngs)
        self.adapter = nnx.LoRA(128, 2, 128, rngs=rngs)

    def __call__(self, x):
        return x + self.base(x)["a"] + self.adapter(x)


@pytest.mark.parametrize("frozen, kept", [(False, 3), (True, 1)])
def test_on_one_rank_weights_that_are_only_cast_are_kept_but_a_frozen_base_is_not_copied(frozen, kept):
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        model = gtp.Stack(lambda rngs: Adapted(rngs), 3, rngs=nnx.Rngs(0))
        model = gtp.nn.freeze(model) if frozen else model
        graph, params, others = nnx.split(model, nnx.Param, ...)

        def residuals(params, others, x):
            _, backward = jax.vjp(lambda params, x: nnx.merge(graph, params, others)(x), params, x)
            return jax.tree.leaves(backward)

        found = jax.eval_shape(residuals, params, others, jax.ShapeDtypeStruct((8, 2, 128), jnp.bfloat16))
    assert sum(one.shape == (192, 128) for one in found) == kept


class Drops(nnx.Module):
    def __init__(self, rngs):
        self.dense = gtp.Dense(128, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.dense(x))


@pytest.mark.parametrize("kept, unroll", pairwise([(1, 1), ("all", 3), (0, 0)], ["full", 1], usual=2))
def test_layers_that_gather_their_own_weights_hand_backward_none_of_them(kept, unroll):
    (keep_gathered, layers), saved = kept, []
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        schedule = gtp.nn.Schedule(keep_gathered=keep_gathered, unroll=unroll)
        make = lambda rngs: gtp.Stack(lambda rngs: Drops(rngs), 3, schedule=schedule, rngs=rngs)  # noqa: E731
        graph, params, others = nnx.split(gtp.nn.abstract_model(make), nnx.Param, ...)

        def call(params, others, x):
            def run(params, x):
                copies = jax.tree.map(lambda a: a, others)  # variables of this trace
                return nnx.merge(graph, params, copies)(x)

            y, backward = jax.vjp(run, params, x)
            saved.extend((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(backward))
            return y

        jax.eval_shape(call, params, others, jax.ShapeDtypeStruct((8, 2, 128), jnp.bfloat16))

    def count(rows, dtype):
        return sum(shape[0] if len(shape) == 3 else 1 for shape, of in saved if (*shape[-2:], of) == (rows, 128, dtype))

    sent = 3 - layers if unroll == "full" and keep_gathered else 0
    assert count(128, jnp.float32) == 3  # the stacked shards, once
    assert count(128, jnp.bfloat16) == sent  # what was cast for the others
    assert count(8 * 128, jnp.bfloat16) == layers  # every rank's copy of what is kept
