"""What `explain` says of attention is what a program compiled for H200s does."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.nn import abstract_model

from ..hlo.programs import array, needs_target

P = jax.sharding.PartitionSpec
LENGTH = 256
CASES = {  # options, inputs, whether cuDNN computes it
    "causal": ({}, {}, True),
    "bidirectional": (dict(causal=False), {}, True),
    "causal window": (dict(window=64), {}, True),
    "window to both sides": (dict(causal=False, window=64), {}, True),
    "segments": ({}, dict(segment_ids=((8, LENGTH), jnp.int32)), True),
    "segments in a window": (dict(window=64), dict(segment_ids=((8, LENGTH), jnp.int32)), True),
    "long rows of segments": ({}, dict(segment_ids=((8, 1024), jnp.int32)), True),
    "mask": (dict(causal=False), dict(mask=((8, LENGTH, LENGTH), jnp.bool_)), True),
    "norms and scale": (dict(qk_norm=True, scale=0.1, rotary_dim=32), {}, True),
    "soft cap": (dict(soft_cap=20.0), {}, False),
    "sinks": (dict(sinks=True), {}, False),
    "dropout": (dict(dropout_rate=0.1), {}, False),
    "float32": (dict(dtype=jnp.float32), {}, False),
    "odd head": (dict(head_dim=60), {}, False),
}
DEFAULT = ("causal window", "long rows of segments", "mask", "soft cap", "odd head")
ARRAY = "as an array of (queries, keys), or above 8192 x 8192 in blocks without cuDNN, except a mask of that size"
USUAL = f"packs segments that are runs; reads a mask and other segments {ARRAY}"
REASONS = {
    "soft cap": "jax.nn has no soft cap in cuDNN's attention",
    "sinks": "jax.nn has no sinks in cuDNN's attention",
    "dropout": "jax.nn has no dropout in cuDNN's attention",
    "float32": "cuDNN supports bfloat16 and float16 on GPUs, and this is float32",
    "odd head": "cuDNN supports heads of a multiple of 8 up to 128 on these GPUs, and this is 60",
    "window to both sides": f"reads a window to both sides {ARRAY}",
}


@needs_target
@pytest.mark.parametrize("name", others_full(CASES, DEFAULT))
def test_what_is_said_to_run_in_cudnn_does_and_nothing_else(name):
    options, inputs, cudnn = CASES[name]
    make = lambda rngs: gtp.Attention(128, **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, **options}, rngs=rngs)  # noqa: E731
    key = dict(dropout_key=jax.random.key(0)) if "dropout_rate" in options else {}
    mesh = gtp.make_mesh(gtp=4, tp=2, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    with jax.set_mesh(mesh):
        model = abstract_model(lambda rngs: nnx.Dict(layer=make(rngs)))
        (fact,) = gtp.explain(model, None).attentions
        graph, params, others = nnx.split(model.layer, nnx.Param, ...)
        given = {name: array(mesh, shape, P(("dp", "gtp")), dtype) for name, (shape, dtype) in inputs.items()}

        def loss(params, others, x, given):
            return jnp.sum(nnx.merge(graph, params, others)(x, **given, **key).astype(jnp.float32))

        length = given["segment_ids"].shape[1] if "segment_ids" in given else LENGTH
        x = array(mesh, (8, length, 128), P(("dp", "gtp"), "tp"), options.get("dtype", jnp.bfloat16))
        text = jax.jit(jax.grad(loss)).lower(params, others, x, given).as_text()
    assert fact.module == "layer"
    assert fact.implementation == ("cuDNN" if cudnn else "written out")
    assert fact.reason == (REASONS.get(name, USUAL) if cudnn else f"{REASONS[name]}; in blocks above 2048 x 2048")
    assert ("__cudnn$fmha" in text) == cudnn
    assert ("PADDING_CAUSAL" in text) == (name == "long rows of segments")  # packed, in the layer's `shard_map`
