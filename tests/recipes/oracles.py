"""Quantized weights by the numpy oracle of `tests/ops`, and an abstract step with a recipe."""

import jax
import numpy as np

from ..ops import oracle


def dequantized(params, form, dtype):
    """The logical parameters with every block's kernels quantized whole, layer by layer, and back, in `dtype`.

    A kernel is `(layers, in, out)`; blocks run along `in`.
    """

    def visit(path, value):
        names = [str(key.key) for key in path]
        if form is None or "layers" not in names or "kernel" not in names:
            return value
        return np.stack([matrix(np.asarray(layer).T, form, dtype).T for layer in value])

    return jax.tree_util.tree_map_with_path(visit, params)


def matrix(weight, form, dtype):
    """A matrix quantized along its rows and back."""
    weight = np.ascontiguousarray(weight, np.float32)
    whole = oracle.amax(weight)
    codes, scales = oracle.quantize(form.name, weight[None], whole)
    back = oracle.dequantize(form.name, codes, scales, whole[None], weight.shape, np.float32)[0]
    return back.astype(dtype)
