"""The encodings in which an export writes a model's tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from ..models import Tensor
from ._quantized import LAYOUTS, Quantized
from ._safetensors import DTYPES, Entry
from ._tiles import InTiles


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The dtypes and layouts of the tensors in a file.

    Attributes:
        dtype: torch's name of the dtype of tensors that are not quantized.
        plain: safetensors' name of that dtype.
        quantized: the layout of the weights of linear layers in attention and MLP, if they are quantized.
    """

    dtype: str
    plain: str
    quantized: Quantized | InTiles | None = None

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Checks that tensors can be written in this encoding.

        Raises:
            ValueError: if one cannot; the message names it.
        """
        tensors = list(tensors)
        expert = next((tensor.name for tensor in tensors if tensor.expert is not None), None)
        if self.quantized is not None and expert is not None:
            raise ValueError(
                f"`dtype` {self.quantized.name!r} does not support experts, but the model has {expert}. Export it as "
                "'bfloat16'."
            )
        if self.quantized is not None:
            self.quantized.check(tensor for tensor in tensors if _in_a_layer(tensor))

    def entries(self, tensor: Tensor) -> list[Entry]:
        """Returns the entries of the file in which a tensor is stored."""
        if self.quantized is not None and _in_a_layer(tensor):
            return self.quantized.entries(tensor)
        return [Entry(tensor.name, self.plain, tensor.shape)]

    def keeps(self, tensor: Tensor, format: str) -> bool:
        """Returns whether a tensor's codes and scales in a format, given by name, can be written as they are."""
        return isinstance(self.quantized, InTiles) and _in_a_layer(tensor) and self.quantized.format.name == format

    def unchanged(self, codes: np.ndarray, scales: np.ndarray) -> list[np.ndarray]:
        """Returns the values of `entries` for a tensor that `keeps` accepts, from its codes and scales."""
        assert isinstance(self.quantized, InTiles)
        return self.quantized.unchanged(codes, scales)

    def arrays(self, tensor: Tensor, values: np.ndarray, amax: Callable[[Tensor], np.float32]) -> list[np.ndarray]:
        """Returns the values of `entries`, rounded to nearest, ties to even.

        Args:
            tensor: the tensor.
            values: the values of the tensor.
            amax: a function that returns the largest finite magnitude of all weights that readers fuse with a given
                weight.
        """
        if self.quantized is not None and _in_a_layer(tensor):
            return self.quantized.arrays(values, amax(tensor) if self.quantized.format.has_amax else None)
        return [values.astype(DTYPES[self.plain][0])]


def _in_a_layer(tensor: Tensor) -> bool:
    return tensor.linear and tensor.layer is not None


ENCODINGS = {
    "bfloat16": Encoding("bfloat16", "BF16"),
    "float32": Encoding("float32", "F32"),
    **{layout.name: Encoding("bfloat16", "BF16", layout) for layout in (InTiles(), *LAYOUTS)},
}
