"""Writes linear weights in MXFP8 and NVFP4 in NVIDIA ModelOpt's layout, which vLLM, SGLang and TensorRT-LLM read.

A linear layer of shape (out, in) becomes these tensors, below its module's name:

    NVFP4  weight          uint8    (out, in / 2)   two e2m1 codes per byte, the even one in the low nibble
           weight_scale    e4m3     (out, in / 16)  one per block of 16
           weight_scale_2  float32  ()              amax / (6 * 448)
           value = code * weight_scale * weight_scale_2
    MXFP8  weight          e4m3     (out, in)
           weight_scale    uint8    (out, in / 32)  e8m0: a biased exponent of 2, one per block of 32
           value = code * 2^(weight_scale - 127)

Scales are stored row by row, not swizzled. Readers fuse the weights of queries, keys and values, and those of gate and
up, and use one `weight_scale_2` for all of them (vLLM uses the largest). The amax is therefore taken over all weights
that are fused. NVFP4 is declared as weight-only (`W4A16_NVFP4`), because quantized activations (`NVFP4`) would need an
`input_scale`, which requires calibration. Readers of `MXFP8` quantize activations dynamically.

Sources: ModelOpt (github.com/NVIDIA/Model-Optimizer), `modelopt/torch/quantization/qtensor/nvfp4_tensor.py` and
`mxfp8_tensor.py`, `modelopt/torch/export/convert_hf_config.py`; and its reader in vLLM
(github.com/vllm-project/vllm), `vllm/model_executor/layers/quantization/modelopt.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import __version__
from ..formats import MXFP8, NVFP4_1D, Format
from ..models import Tensor
from ..ops import quantize
from ._safetensors import DTYPES, Entry

# Modules that are not quantized, in addition to embeddings and norms.
_IGNORED = ["lm_head"]
# Blocks do not span rows, so a matrix can be quantized in slices of rows, which bounds memory.
_SLICE_ELEMENTS = 1 << 22


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A layout of quantized weights.

    Attributes:
        name: the `dtype` of an export.
        algorithm: ModelOpt's name.
        format: our format.
        codes: safetensors' dtype of the codes.
        scales: safetensors' dtype of the block scales.
        config: further fields of `quantization_config` in config.json.
    """

    name: str
    algorithm: str
    format: Format
    codes: str
    scales: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def block(self) -> int:
        """The number of input features that share a scale."""
        assert self.format.block is not None and self.format.block[0] == 1
        return self.format.block[1]

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Checks that the rows of weights consist of whole blocks.

        Raises:
            ValueError: if a weight's rows do not; the message names the weight.
        """
        for tensor in tensors:
            if tensor.shape[1] % self.block:
                raise ValueError(
                    f"`dtype` {self.name!r} has blocks of {self.block} input features, which do not divide the "
                    f"{tensor.shape[1]} of {tensor.name}. Export it as 'bfloat16'."
                )

    def entries(self, tensor: Tensor) -> list[Entry]:
        """Returns the entries of the file in which a weight is stored."""
        rows, columns = tensor.shape
        packed = columns * self.format.element_bits // 8
        listed = [
            Entry(tensor.name, self.codes, (rows, packed)),
            Entry(f"{tensor.name}_scale", self.scales, (rows, columns // self.block)),
        ]
        return [*listed, Entry(f"{tensor.name}_scale_2", "F32", ())] if self.format.has_amax else listed

    def arrays(self, values: np.ndarray, amax: np.float32 | None) -> list[np.ndarray]:
        """Returns the values of `entries`.

        Args:
            values: the values of the weight, (out, in).
            amax: the amax over all weights that readers fuse with this one, for a format that has one.
        """
        rows = max(1, _SLICE_ELEMENTS // values.shape[1])
        slices = range(0, values.shape[0], rows)
        made = [self._slice(values[begin : begin + rows], amax) for begin in slices]
        codes, scales = (np.concatenate(parts) for parts in zip(*made, strict=True))
        written = [codes.view(DTYPES[self.codes][0]), scales.view(DTYPES[self.scales][0])]
        if amax is None:
            return written
        # If all values are 0, the scale is 1, because a reader may divide by it.
        return [*written, np.asarray(amax / np.float32(6 * 448) if amax > 0 else 1, np.float32)]

    def _slice(self, values: np.ndarray, amax: np.float32 | None) -> tuple[np.ndarray, np.ndarray]:
        quantized = quantize(jnp.asarray(values, jnp.float32), self.format, amax=amax)
        return np.asarray(quantized.codes), np.asarray(quantized.scales)

    def config_json(self) -> dict[str, Any]:
        """Returns the `quantization_config` of config.json."""
        return {
            "quant_method": "modelopt",
            "quant_algo": self.algorithm,
            **self.config,
            "ignore": _IGNORED,
            "producer": _producer(),
        }

    def quant_json(self) -> dict[str, Any]:
        """Returns the content of hf_quant_config.json, which older readers use."""
        return {
            "producer": _producer(),
            "quantization": {
                "quant_algo": self.algorithm,
                "kv_cache_quant_algo": None,
                "group_size": self.block,
                "exclude_modules": _IGNORED,
            },
        }


def _producer() -> dict[str, str]:
    return {"name": "gtp_jax", "version": __version__}


_WEIGHTS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}

LAYOUTS = (
    Quantized("mxfp8", "MXFP8", MXFP8, "F8_E4M3", "U8"),
    Quantized(
        "nvfp4",
        "W4A16_NVFP4",
        NVFP4_1D,
        "U8",
        "F8_E4M3",
        {"config_groups": {"group_0": {"weights": _WEIGHTS, "targets": ["Linear"]}}},
    ),
)
