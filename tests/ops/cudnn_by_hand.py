"""What cuDNN computes for XLA's custom calls of attention, written out: takes the place of `jax.ffi.ffi_call`.

It reads the backend configuration and the operands as XLA does: documents by their offsets into memory, softmax
statistics by document and place. What cuDNN leaves unwritten is not a number here.
"""

import json

import jax
import jax.numpy as jnp


def call(target, results, *, custom_call_api_version, legacy_backend_config, output_layouts, vmap_method):
    """Returns the function that a target stands for."""
    assert custom_call_api_version == 2 and vmap_method is None
    assert output_layouts[-1] == (0,) and results[-1].shape == (0,)  # the workspace
    config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
    assert config["is_flash_attention"] and not config["is_paged_attention"] and not config["dropout_rate"]
    return lambda *operands: _run(target, config, [x.shape for x in results], *operands)


def _run(target, config, shapes, *operands):
    operands = list(operands)
    take = lambda many: [operands.pop(0) for _ in range(many)]  # noqa: E731
    backward = target.endswith("Backward")
    q, k, v = take(3)
    stats, of_out = take(2) if backward else (None, None)
    (bias,) = take(1) if "ScaleBias" in target else (None,)
    (out,) = take(1) if backward else (None,)
    batch, length, heads, width = q.shape
    rooms = config["max_seg_per_batch"]
    lengths, _, offsets, kv_offsets = take(4) if rooms > 1 else _whole_rows(q, k)
    assert not operands and config["mask_type"].startswith("PADDING") == (rooms > 1)
    dims = [batch, heads, length, length]
    assert config["intermediate_tensor_shape"]["dimensions"] == [str(n) for n in dims]
    offsets, kv_offsets = offsets[:-1], kv_offsets[:-1]
    documents = jnp.arange(batch * rooms)

    place = jnp.arange(length)
    near = place[:, None] - place
    ordered = jnp.ones((length, length), bool) if not config["mask_type"].endswith("CAUSAL") else near >= 0
    if window := config["sliding_window_length"]:
        ordered &= near < window

    def read(x, offset):  # (places, heads, head_dim) of a document
        return jnp.take(x.reshape(-1), offset + jnp.arange(length * x.shape[2] * width), mode="clip").reshape(
            length, x.shape[2], width
        )

    def one(d):
        there = place < lengths[d]
        seen = ordered & there & there[:, None]
        qd, kd, vd = read(q, offsets[d]), read(k, kv_offsets[d]), read(v, kv_offsets[d])
        kd, vd = (jnp.repeat(x, heads // k.shape[2], axis=1) for x in (kd, vd))
        scores = jnp.einsum("qhd,khd->hqk", qd, kd) * config["fmha_scale"]
        scores = scores if bias is None else scores + bias[d, 0]
        scores = jnp.where(seen, scores, -jnp.inf)
        if not backward:
            lse = jax.nn.logsumexp(scores, axis=-1)
            probs = jnp.where(seen, jnp.exp(scores - jnp.where(there, lse, 0)[..., None]), 0)
            return jnp.einsum("hqk,khd->qhd", probs, vd), jnp.where(there, lse, jnp.nan)
        probs = jnp.where(seen, jnp.exp(scores - stats[d][..., None]), 0)
        dy, y = read(of_out, offsets[d]), read(out, offsets[d])
        inner = jnp.einsum("qhd,khd->hqk", dy, vd) - jnp.einsum("qhd,qhd->hq", dy, y)[..., None]
        of_scores = jnp.where(seen, probs * inner * config["fmha_scale"], 0)
        groups = lambda x: x.reshape(length, k.shape[2], -1, width).sum(2)  # noqa: E731
        return (
            jnp.einsum("hqk,khd->qhd", of_scores, kd),
            groups(jnp.einsum("hqk,qhd->khd", of_scores, qd)),
            groups(jnp.einsum("hqk,qhd->khd", probs, dy)),
        )

    def write(values, offsets, like):  # what documents have at their offsets, the rest unwritten
        to = offsets[:, None] + jnp.arange(length * like.shape[2] * width)
        to = jnp.where(jnp.repeat(place < lengths[:, None], like.shape[2] * width, axis=1), to, like.size)
        memory = jnp.full(like.size, jnp.nan, like.dtype).at[to.reshape(-1)].set(values.reshape(-1), mode="drop")
        return jnp.swapaxes(memory.reshape(like.shape), 1, 2)

    if not backward:
        y, lse = jax.vmap(one)(documents)
        results = [write(y, offsets, q), lse]
    else:
        dq, dk, dv = jax.vmap(one)(documents)
        results = [write(dq, offsets, q), write(dk, kv_offsets, k), write(dv, kv_offsets, v)]
    results.append(jnp.zeros(0, jnp.uint8))
    assert [x.shape for x in results] == shapes
    return results


def _whole_rows(q, k):
    rows = jnp.arange(q.shape[0] + 1)
    lengths = jnp.full(q.shape[0], q.shape[1])
    return lengths, lengths, *(rows * (x.size // q.shape[0]) for x in (q, k))
