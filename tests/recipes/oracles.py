"""Quantized weights by the numpy oracle of `tests/ops`, and an abstract step with a recipe."""

import jax
import numpy as np

from gtp_jax.formats import Tiled

from ..ops import oracle


def dequantized(params, form, dtype):
    """The logical parameters with every block's kernels quantized whole, layer by layer, and back, in `dtype`.

    A kernel is `(layers, in, out)`, or `(layers, experts, out, in)` of which each is quantized by itself; blocks run
    along `in`.
    """

    def visit(path, value):
        names = [str(key.key) for key in path]
        if form is None or "layers" not in names or "kernel" not in names:
            return value
        matrices = np.asarray(value).reshape(-1, *value.shape[-2:])
        if value.ndim == 4:
            return np.stack([matrix(one, form, dtype) for one in matrices]).reshape(value.shape)
        return np.stack([matrix(one.T, form, dtype).T for one in matrices])

    return jax.tree_util.tree_map_with_path(visit, params)


def matrix(weight, form, dtype):
    """A matrix quantized along its rows and back, or in tiles."""
    weight = np.ascontiguousarray(weight, np.float32)
    if isinstance(form, Tiled):
        return oracle.rounded_blocked(weight, form.format.run).astype(dtype)
    whole = oracle.amax(weight)
    codes, scales = oracle.quantize(form.name, weight[None], whole)
    back = oracle.dequantize(form.name, codes, scales, whole[None], weight.shape, np.float32)[0]
    return back.astype(dtype)
