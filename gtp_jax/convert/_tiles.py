"""Writes linear weights in FP8 in blocks of 128 x 128, as Qwen3-FP8 and DeepSeek-V3 are published.

A linear layer of shape (out, in) becomes these tensors, below its module's name:

    weight            e4m3     (out, in)
    weight_scale_inv  float32  (ceil(out / 128), ceil(in / 128))
    value = code * weight_scale_inv

Readers quantize activations dynamically. Source: transformers, `quantizer_finegrained_fp8.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..formats import FP8_BLOCKS, Format, scales_shape
from ..models import Tensor
from ..ops import quantize
from ._safetensors import DTYPES, Entry

# Slices of this many rows consist of whole tiles. A matrix is quantized slice by slice, which bounds memory.
_SLICE_ROWS = 8 * FP8_BLOCKS.run[0]


@dataclasses.dataclass(frozen=True)
class InTiles:
    """A layout of quantized weights whose blocks span several rows.

    Attributes:
        name: the `dtype` of an export.
        format: our format.
    """

    name: str = "fp8"
    format: Format = FP8_BLOCKS

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Accepts all weights: the last block of a dimension may be shorter."""
        del tensors

    def entries(self, tensor: Tensor) -> list[Entry]:
        """Returns the entries of the file in which a weight is stored."""
        grid = scales_shape(self.format, (tensor.shape[0], tensor.shape[1]), False)
        assert grid is not None
        return [Entry(tensor.name, "F8_E4M3", tensor.shape), Entry(f"{tensor.name}_scale_inv", "F32", grid)]

    def arrays(self, values: np.ndarray, amax: np.float32 | None) -> list[np.ndarray]:
        """Returns the values of `entries`.

        Args:
            values: the values of the weight, (out, in).
            amax: `None`, because the format has none.
        """
        del amax
        starts = range(0, values.shape[0], _SLICE_ROWS)
        made = [quantize(jnp.asarray(values[i : i + _SLICE_ROWS], jnp.float32), self.format) for i in starts]
        codes, scales = (np.concatenate([np.asarray(getattr(q, name)) for q in made]) for name in ("codes", "scales"))
        return self.unchanged(codes, scales)

    def unchanged(self, codes: np.ndarray, scales: np.ndarray) -> list[np.ndarray]:
        """Returns the values of `entries`, given the codes and scales of a weight."""
        return [codes.view(DTYPES["F8_E4M3"][0]), scales]

    def config_json(self) -> dict[str, Any]:
        """Returns the `quantization_config` of config.json."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.format.run),
            "modules_to_not_convert": ["lm_head"],
        }

    def quant_json(self) -> None:
        """Returns the content of hf_quant_config.json: `None`, because no reader needs that file."""
