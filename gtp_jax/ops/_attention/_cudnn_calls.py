"""Calls cuDNN's fused attention through XLA's custom calls, because `jax.nn.dot_product_attention` does not support
packed rows.

XLA replaces custom calls of these targets by cuDNN's kernels, and takes their parameters from the backend
configuration: openxla/xla, `xla/backends/gpu/transforms/cudnn_custom_call_compiler.cc` and `CudnnfMHABackendConfig` of
`xla/service/gpu/backend_configs.proto`. Attention without documents is exactly the call that jax.nn emits; a test
compares the two.

In cuDNN's packed layout (ragged offsets), each document is an example of its own, with a length and an offset. What is
between documents is neither read nor written. The number of documents is a constant of the program, a multiple of the
batch; unused documents have length 0.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_FORWARD = {False: "__cudnn$fmhaSoftmax", True: "__cudnn$fmhaScaleBiasSoftmax"}
_BACKWARD = {False: "__cudnn$fmhaSoftmaxBackward", True: "__cudnn$fmhaScaleBiasSoftmaxBackward"}
_FORWARD_FP8 = "__cudnn$fmhaSoftmaxF8"
# the dtype of the scores and of the softmax's weights in cuDNN; those of E4M3 operands count as bfloat16
_ELEMENTS = {"bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "BF16"}
_STATUS_RETURNING = 2  # the version of the custom call API that jax.nn sets for these targets

# The dimension numbers of attention's matmuls, for operands (batch, sequence, heads, head_dim) and scores (batch,
# heads, queries, keys): the contracted dimension of the left operand and of the right one, then the batch dimensions of
# the left operand and of the right one.
_FORWARD_DOTS = {
    "bmm1_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),
    "bmm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),
}
_BACKWARD_DOTS = {
    "bmm1_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2_dot_dimension_numbers": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1_dot_dimension_numbers": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2_dot_dimension_numbers": (3, 3, (0, 2), (0, 2)),
}


class Ragged(NamedTuple):
    """The positions of documents, in tokens of all rows concatenated.

    Attributes:
        starts: `(documents + 1,)` int32, ascending. Entries after the last document are the number of tokens.
        lengths: `(documents,)` int32, at most the sequence length of `q`. A document may extend across rows of `q`.
    """

    starts: jax.Array
    lengths: jax.Array


class Scales(NamedTuple):
    """The scales of attention in FP8, float32 scalars.

    Attributes:
        of_queries, of_keys, of_values, of_weights: the factors by which codes become values.
        to_weights, to_output: the factors by which values become codes.
    """

    of_queries: jax.Array
    of_keys: jax.Array
    of_values: jax.Array
    of_weights: jax.Array
    to_weights: jax.Array
    to_output: jax.Array


class Options(NamedTuple):
    """The options that are constants of an attention kernel.

    Attributes:
        causal: whether a query may not attend to later keys.
        window: the number of keys that a query attends to, its own included; only with `causal`.
        scale: the factor of the scores.
    """

    causal: bool
    window: int | None
    scale: float


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, documents: Ragged | None, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Computes attention, and the statistics of the softmax that backward needs.

    Args:
        q: `(batch, sequence, heads, head_dim)`, bfloat16 or float16.
        k: `(batch, sequence, kv_heads, head_dim)`.
        v: the same shape as `k`.
        bias: `(batch, 1, sequence, sequence)`, added to the scores.
        documents: the documents within which tokens attend to one another; `None` if every row is a document.
        options: the options of the kernel.

    Returns:
        The output, `(batch, sequence, heads, head_dim)`, and the log-sum-exp of the scores, float32:
        `(batch, heads, sequence)`, or `(documents, heads, sequence)` by position within each document.
    """
    batch, sequence, heads, _ = q.shape
    count = batch if documents is None else documents.lengths.size
    stats = jax.ShapeDtypeStruct((count, heads, sequence), jnp.float32)
    operands = [q, k, v, *([] if bias is None else [bias]), *_ragged(q, k, documents)]
    config = _config(q, k, options, _FORWARD_DOTS, count // batch)
    out, stats = _call(_FORWARD[bias is not None], [_heads_first(q)], [stats], operands, config)
    return out, stats


def forward_fp8(
    q: jax.Array, k: jax.Array, v: jax.Array, scales: Scales, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Computes attention in FP8, and the statistics of the softmax that backward needs.

    Args:
        q: `(batch, queries, heads, head_dim)`, E4M3; `queries` is a multiple of 128, and `head_dim` is 128.
        k: `(batch, keys, kv_heads, head_dim)`; `keys` is a multiple of 128.
        v: the same shape as `k`.
        scales: the scales of the operands, of the softmax's weights, and of the output.
        options: the options of the kernel; there is none with a window.

    Returns:
        The output, E4M3 `(batch, queries, heads, head_dim)`, and the log-sum-exp of the scores, float32
        `(batch, heads, queries)`.
    """
    batch, sequence, heads, _ = q.shape
    amax, stats = (jax.ShapeDtypeStruct(n, jnp.float32) for n in ((1, 1, 1, 1), (batch, heads, sequence)))
    operands = [q, k, v, *(jnp.reshape(scale, (1, 1, 1, 1)) for scale in scales)]
    config = _config(q, k, options, _FORWARD_DOTS)
    # The call also returns the amaxes of the softmax's weights and of the output, which nothing needs. It is sequential
    # under `vmap`, because each example has scales of its own.
    out, _, _, stats = _call(_FORWARD_FP8, [_heads_first(q)], [amax, amax, stats], operands, config, "sequential")
    return out, stats


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    documents: Ragged | None,
    stats: jax.Array,
    out: jax.Array,
    of_out: jax.Array,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of `q`, `k` and `v` from the gradient of the output; `bias` has no gradient.

    Args:
        q, k, v, bias, documents, options: as in `forward`.
        stats, out: what `forward` returned.
        of_out: the gradient of `out`.
    """
    count = q.shape[0] if documents is None else documents.lengths.size
    operands = [q, k, v, stats, of_out, *([] if bias is None else [bias]), out, *_ragged(q, k, documents)]
    config = _config(q, k, options, _BACKWARD_DOTS, count // q.shape[0])
    dq, dk, dv = _call(_BACKWARD[bias is not None], [_heads_first(x) for x in (q, k, v)], [], operands, config)
    return dq, dk, dv


def _call(
    target: str,
    heads_first: list[Any],
    others: list[Any],
    operands: list[jax.Array],
    config: str,
    vmap_method: str | None = None,
) -> list[Any]:
    """Calls a target whose results are arrays with heads before the sequence, then other arrays, then the workspace."""
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)  # XLA gives it the size that cuDNN requires
    # in memory, the sequence is before the heads, as in the operands, so the transposition moves no data
    layouts = [(0, 2, 1, 3)] * len(heads_first) + [tuple(range(x.ndim)) for x in others] + [(0,)]
    results = jax.ffi.ffi_call(
        target,
        [*heads_first, *others, workspace],
        vmap_method=vmap_method,
        output_layouts=layouts,
        custom_call_api_version=_STATUS_RETURNING,
        legacy_backend_config=config,
    )(*operands)
    count = len(heads_first)
    return [*(jnp.swapaxes(x, 1, 2) for x in results[:count]), *results[count:-1]]


def _heads_first(x: jax.Array) -> jax.ShapeDtypeStruct:
    batch, sequence, heads, head_dim = x.shape
    return jax.ShapeDtypeStruct((batch, heads, sequence, head_dim), x.dtype)


def _ragged(q: jax.Array, k: jax.Array, documents: Ragged | None) -> list[jax.Array]:
    """Returns the lengths of documents in queries and keys, and their offsets in elements; without documents, an empty
    list."""
    if documents is None:
        return []
    starts, lengths = documents
    return [lengths, lengths, *(starts * (x.shape[2] * x.shape[3]) for x in (q, k))]


def _config(q: jax.Array, k: jax.Array, options: Options, dots: dict[str, Any], documents: int | None = None) -> str:
    """Returns the backend configuration. `documents` is the number per row; `None` for a target without documents."""
    batch, sequence, heads, _ = q.shape
    mask = {
        (False, False): "NO_MASK",
        (True, False): "CAUSAL",
        (False, True): "PADDING",
        (True, True): "PADDING_CAUSAL",
    }
    attention = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": options.scale,
        "intermediate_tensor_shape": {
            "element_type": _ELEMENTS[q.dtype.name],
            "dimensions": [str(n) for n in (batch, heads, sequence, k.shape[1])],
            "tuple_shapes": [],
            "layout": {
                "dim_level_types": [],
                "dim_unique": [],
                "dim_ordered": [],
                "minor_to_major": ["3", "2", "1", "0"],
                "tiles": [],
                "element_size_in_bits": "0",
                "memory_space": "0",
                "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "dynamic_shape_metadata_prefix_bytes": "0",
            },
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": mask[options.causal, documents not in (None, 1)],
        **{name: _dot(*dot) for name, dot in dots.items()},
    }
    if documents is not None:
        attention |= {
            "dropout_rate": 0.0,
            "seed": 42,
            "sliding_window_length": options.window or 0,
            "max_seg_per_batch": documents,
            "is_paged_attention": False,
        }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": attention})


def _dot(left: int, right: int, left_batch: tuple[int, ...], right_batch: tuple[int, ...]) -> dict[str, list[str]]:
    return {
        "lhs_contracting_dimensions": [str(left)],
        "rhs_contracting_dimensions": [str(right)],
        "lhs_batch_dimensions": [str(n) for n in left_batch],
        "rhs_batch_dimensions": [str(n) for n in right_batch],
    }
