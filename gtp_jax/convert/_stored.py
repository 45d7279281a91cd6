"""Reads quantized weights in the layouts of other libraries, and computes their values.

A linear layer of shape (out, in) is stored as codes, block scales, and in some layouts one scale of the whole weight:

    value = code * block scale                      FP8, MXFP8, MXFP4
    value = code * block scale * weight scale       NVFP4 of ModelOpt
    value = code * block scale / weight scale       NVFP4 of compressed-tensors

The instances of `StoredAs` give names, dtypes and blocks. Sources: `quantizer_finegrained_fp8.py` of transformers
(Qwen3-FP8, DeepSeek-V3); `compressors/` of compressed-tensors (llm-compressor); and for ModelOpt the sources that
`_quantized.py` names. Scales of activations and of the key-value cache are left out: training does not use them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._foreign import brief
from ..formats import FP8_BLOCKS, Format
from ..models import Tensor
from ._safetensors import DTYPES, Reader

# The dtypes of weights that are not quantized. A float32 master holds their values exactly.
PLAIN_DTYPES = ("F32", "BF16", "F16")
# Scales of activations and of the key-value cache, below a module's name.
_LEFT_OUT = ("input_scale", "input_global_scale", "output_scale", "q_scale", "k_scale", "v_scale")

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])

ALL = 0  # in a block: every row, or every column


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A tensor that a model needs in a file.

    Attributes:
        name: the tensor's name.
        dtypes: the dtypes that it may have, as safetensors names them.
        shapes: the shapes that it may have.
    """

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class StoredAs:
    """A layout of quantized weights in a file.

    Attributes:
        name: the layout's name, for messages.
        codes: the name of the codes, below the module's name.
        code_dtype: the dtype of the codes, as safetensors names it; U8 holds two E2M1 codes per byte, the even one in
            the low nibble.
        scales: the name of the block scales.
        scale_dtypes: the dtypes that the block scales may have; U8 and F8_E8M0 hold biased exponents.
        block: the numbers of rows and columns that share a scale, or `ALL`. The last block of a dimension may be
            shorter.
        weight_scale: the name of the scale of the whole weight, if there is one.
        divides: whether values are divided by that scale.
    """

    name: str
    codes: str
    code_dtype: str
    scales: str
    scale_dtypes: tuple[str, ...]
    block: tuple[int, int]
    weight_scale: str | None = None
    divides: bool = False

    @property
    def format(self) -> Format | None:
        """The format in which ranks can store the codes and scales as they are; `None` if there is none."""
        tiles = self.code_dtype == "F8_E4M3" and self.block == FP8_BLOCKS.block and self.weight_scale is None
        return FP8_BLOCKS if tiles else None

    def unchanged(self, parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns a weight's codes in `format`, uint8 `(out, in)`, and its scales, float32.

        Args:
            parts: the tensors that `wanted` lists, in the same order.
        """
        codes, scales = parts
        return codes.view(np.uint8), _numbers(scales)

    def wanted(self, tensor: Tensor) -> list[Wanted]:
        """Returns the tensors in which a weight is stored: codes, block scales, and the weight's scale."""
        rows, columns = tensor.stored_shape
        packed = (rows, columns // 2) if self.code_dtype == "U8" else (rows, columns)
        listed = [
            Wanted(self._at(tensor, self.codes), (self.code_dtype,), (packed,)),
            Wanted(self._at(tensor, self.scales), self.scale_dtypes, self._scale_shapes(rows, columns)),
        ]
        if self.weight_scale is not None:
            listed.append(Wanted(self._at(tensor, self.weight_scale), ("F32",), ((), (1,))))
        return listed

    def values(self, parts: list[np.ndarray]) -> np.ndarray:
        """Returns a weight's values, float32 `(out, in)`, each rounded once.

        Args:
            parts: the tensors that `wanted` lists, in the same order.
        """
        codes, scales, *of_weight = parts
        if self.code_dtype == "U8":
            values = _E2M1[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(codes.shape[0], -1)
        else:
            values = codes.astype(np.float32)
        exact = self._spread(_numbers(scales), values.shape)
        # a code has at most 4 significant bits and an FP8 scale has 4, so their product is exact
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # the import refuses NaN and Inf
            values *= exact
            for scale in of_weight:
                own = np.float32(scale.reshape(()))
                values = values / own if self.divides else values * own
        return values

    def not_finite(self, parts: list[np.ndarray]) -> int | None:
        """Returns the index of the first tensor of a weight that holds NaN or Inf; `None` if none does.

        Args:
            parts: the tensors that `wanted` lists, in the same order.
        """
        codes, scales, *of_weight = parts
        numbers = [np.float32(0) if self.code_dtype == "U8" else codes.astype(np.float32), _numbers(scales), *of_weight]
        return next((i for i, part in enumerate(numbers) if not np.isfinite(part).all()), None)

    def _scale_shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        if self.block == (ALL, ALL):
            return (), (1,), (1, 1)
        if self.block == (1, ALL):
            return (rows, 1), (rows,)
        return ((-(-rows // self.block[0]), -(-columns // self.block[1])),)

    def _spread(self, scales: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
        """Returns block scales in a shape that broadcasts to that of the weight."""
        if ALL in self.block:
            return scales.reshape(-1, 1)
        for axis, (run, size) in enumerate(zip(self.block, shape, strict=True)):
            scales = np.repeat(scales, run, axis=axis).take(range(size), axis=axis) if run > 1 else scales
        return scales

    @staticmethod
    def _at(tensor: Tensor, part: str) -> str:
        return f"{tensor.name.removesuffix('weight')}{part}"


class StackedMXFP4(StoredAs):
    """The layout of gpt-oss: MXFP4 of all experts of a layer, whose weights are `(experts, in, out)`, as codes
    `(experts, out, in / 32, 16)` and scales `(experts, out, in / 32)`."""

    def wanted(self, tensor: Tensor) -> list[Wanted]:
        if len(tensor.stored_shape) != 3:
            return super().wanted(tensor)
        experts, inputs, outputs = tensor.stored_shape
        blocks = experts, outputs, inputs // self.block[1]
        return [
            Wanted(self._at(tensor, self.codes), (self.code_dtype,), ((*blocks, self.block[1] // 2),)),
            Wanted(self._at(tensor, self.scales), self.scale_dtypes, (blocks,)),
        ]

    def values(self, parts: list[np.ndarray]) -> np.ndarray:
        codes, scales = parts
        values = _E2M1[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:-1], -1)
        values *= _numbers(scales)[..., None]
        return np.swapaxes(values.reshape(*codes.shape[:2], -1), 1, 2)


def _numbers(scales: np.ndarray) -> np.ndarray:
    """Returns scales in float32; biased exponents become 2^(scale - 127), and 255 becomes NaN."""
    if scales.dtype.itemsize == 1 and scales.dtype != DTYPES["F8_E4M3"][0]:
        exponents = scales.view(np.uint8).astype(np.int32)
        powers = np.ldexp(np.float32(1), np.minimum(exponents, 254) - 127)
        return np.where(exponents == 255, np.float32(np.nan), powers)
    return scales.astype(np.float32)


def tensors_of(tensor: Tensor, readers: Mapping[str, Reader], stored_as: StoredAs | None) -> list[Wanted]:
    """Returns the tensors in which a weight is stored: the weight itself, or its parts if it is quantized."""
    plain = Wanted(tensor.name, PLAIN_DTYPES, (tensor.stored_shape,))
    if stored_as is None or not tensor.linear:
        return [plain]
    there = readers.get(tensor.name)
    if there is not None and there.entries[tensor.name].dtype in PLAIN_DTYPES:
        return [plain]  # this module is not quantized
    return stored_as.wanted(tensor)


def is_left_out(name: str) -> bool:
    """Returns whether a tensor scales activations or the key-value cache instead of a weight."""
    return name.rpartition(".")[2] in _LEFT_OUT


_FP8 = StoredAs("FP8", "weight", "F8_E4M3", "weight_scale", PLAIN_DTYPES, (ALL, ALL))
_MX_SCALES = ("U8", "F8_E8M0")
_COMPRESSED_NVFP4 = StoredAs(
    "NVFP4 of compressed-tensors",
    "weight_packed",
    "U8",
    "weight_scale",
    ("F8_E4M3",),
    (1, 16),
    "weight_global_scale",
    True,
)
_COMPRESSED_MXFP4 = StoredAs("MXFP4 of compressed-tensors", "weight_packed", "U8", "weight_scale", _MX_SCALES, (1, 32))
_MODELOPT_NVFP4 = StoredAs("NVFP4 of ModelOpt", "weight", "U8", "weight_scale", ("F8_E4M3",), (1, 16), "weight_scale_2")
_MODELOPT = {
    "FP8": _FP8,
    "MXFP8": StoredAs("MXFP8 of ModelOpt", "weight", "F8_E4M3", "weight_scale", _MX_SCALES, (1, 32)),
    "NVFP4": _MODELOPT_NVFP4,
    "W4A16_NVFP4": _MODELOPT_NVFP4,
}
_GPT_OSS = StackedMXFP4("MXFP4 of gpt-oss", "_blocks", "U8", "_scales", _MX_SCALES, (1, 32))
_BLOCKS = {"tensor": (ALL, ALL), "channel": (1, ALL)}
# The layouts that can be read, for messages.
READ = (
    "FP8 with `weight_scale_inv` (quant_method 'fp8'); FP8 per tensor, channel or block, NVFP4 and MXFP4 of "
    "compressed-tensors; FP8, MXFP8 and NVFP4 of ModelOpt; MXFP4 of gpt-oss (quant_method 'mxfp4')"
)


def stored_as(quantization: Any, file: str) -> StoredAs | None:
    """Returns the layout of a model's quantized weights.

    Args:
        quantization: the field `quantization_config` of a config.json.
        file: the file's name, for messages.

    Returns:
        `None` if nothing is quantized.

    Raises:
        ValueError: if the layout cannot be read; the message names the field, its value and the layouts that can.
    """
    if quantization is None:
        return None
    if not isinstance(quantization, dict):
        raise ValueError(f"{file} has quantization_config {brief(quantization)}; an object, or none, is expected.")
    method = quantization.get("quant_method")
    if method == "fp8":
        return _fine_grained(quantization, file)
    if method == "mxfp4":
        return _GPT_OSS
    if method == "modelopt":
        algorithm = quantization.get("quant_algo")
        if isinstance(algorithm, str) and algorithm in _MODELOPT:
            return _MODELOPT[algorithm]
        raise _unread(file, "quant_algo", algorithm)
    if method == "compressed-tensors":
        return _compressed(quantization, file)
    raise _unread(file, "quant_method", method)


def _unread(file: str, field: str, value: Any) -> ValueError:
    return ValueError(
        f"{file} has {field} {brief(value)} in its quantization_config. The quantized weights that can be imported are "
        f"{READ}. Dequantize the model with the library that made it, or take the publisher's bfloat16 weights."
    )


def _fine_grained(quantization: Mapping[str, Any], file: str) -> StoredAs:
    """Returns the layout of `quant_method` fp8: with blocks, or with one scale per weight."""
    if quantization.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _unread(file, "fmt", quantization["fmt"])
    kind = quantization.get("scale_fmt", "float")
    if kind not in ("float", "ue8m0", None):
        raise _unread(file, "scale_fmt", kind)
    dtypes = (*PLAIN_DTYPES, "F8_E8M0")
    return dataclasses.replace(
        _FP8,
        name="FP8 with weight_scale_inv",
        scales="weight_scale_inv",
        scale_dtypes=dtypes,
        block=_block(quantization.get("weight_block_size"), "weight_block_size", file),
    )


def _block(sizes: Any, field: str, file: str) -> tuple[int, int]:
    if sizes is None:
        return ALL, ALL
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(n) is int and 0 < n <= 1 << 20 for n in sizes):
        return sizes[0], sizes[1]
    raise ValueError(
        f"{file} has {field} {brief(sizes)}; two whole numbers of at least 1, rows and columns, are expected."
    )


def _compressed(quantization: Mapping[str, Any], file: str) -> StoredAs:
    """Returns the layout that compressed-tensors describes, which must be the same for all groups of modules."""
    for field in ("sparsity_config", "transform_config"):
        if quantization.get(field):
            raise _unread(file, field, quantization[field])
    status = quantization.get("quantization_status", "compressed")
    if status != "compressed":
        raise _unread(file, "quantization_status", status)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unread(file, "config_groups", groups)
    found = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _unread(file, "config_groups", groups)
        form = group.get("format") or quantization.get("format")
        found.add(_compressed_group(form, weights, file))
    if len(found) > 1:
        raise _unread(file, "config_groups", groups)
    return found.pop()


def _compressed_group(form: Any, weights: Mapping[str, Any], file: str) -> StoredAs:
    if weights.get("symmetric", True) is not True or weights.get("actorder"):
        raise _unread(file, "weights", weights)
    if form == "nvfp4-pack-quantized" and weights.get("group_size") == 16:
        return _COMPRESSED_NVFP4
    if form == "mxfp4-pack-quantized" and weights.get("group_size") == 32:
        return _COMPRESSED_MXFP4
    if form in ("float-quantized", "naive-quantized") and (weights.get("type"), weights.get("num_bits")) == (
        "float",
        8,
    ):
        strategy = weights.get("strategy")
        if strategy == "block" and weights.get("block_structure") is not None:
            block = _block(weights["block_structure"], "block_structure", file)
            return dataclasses.replace(_FP8, name="FP8 in blocks, of compressed-tensors", block=block)
        if isinstance(strategy, str) and strategy in _BLOCKS:
            return dataclasses.replace(_FP8, name=f"FP8 per {strategy}, of compressed-tensors", block=_BLOCKS[strategy])
        raise _unread(file, "strategy", strategy)
    raise _unread(file, "format", form)
