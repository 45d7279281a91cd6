"""Describes the tensors of a Hugging Face model, and where each is in our parameters."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a Hugging Face model, and where it is in our parameters.

    The weight of a linear layer is (out, in) in Hugging Face's files and (in, out) in our arrays, except that an
    expert's weight is (out, in) in both. Layers and experts are separate tensors in their files and stacked in ours.

    Attributes:
        name: the name in Hugging Face's files.
        shape: the shape in Hugging Face's files.
        path: the path of our array below `params`, joined by slashes.
        layer: the index of this tensor in the first dimension of our array; `None` if it is the whole array.
        expert: the index of this tensor in the second dimension, which stacks experts; `None` if experts are not
            stacked.
        linear: whether it is the weight of a linear layer.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    layer: int | None
    linear: bool
    expert: int | None = None

    @property
    def transposed(self) -> bool:
        """Whether the two dimensions are swapped between their tensor and our array."""
        return self.linear and self.expert is None

    @property
    def fused(self) -> str:
        """A name that linear weights share if one matmul multiplies the same tokens by them, here and in other tools.
        The gate and the up projection of an expert share one, which is no other expert's."""
        return f"{self.path.rpartition('kernel')[0]}{self.layer}.{self.expert}"


def array_shapes(tensors: Iterable[Tensor]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of our arrays by path."""
    shapes: dict[str, tuple[int, ...]] = {}
    layers: dict[str, set[int | None]] = collections.defaultdict(set)
    experts: dict[str, set[int | None]] = collections.defaultdict(set)
    for tensor in tensors:
        shapes[tensor.path] = tensor.shape[::-1] if tensor.transposed else tensor.shape
        layers[tensor.path].add(tensor.layer)
        experts[tensor.path].add(tensor.expert)
    stacked = {path: [len(of[path]) for of in (layers, experts) if None not in of[path]] for path in shapes}
    return {path: (*stacked[path], *shape) for path, shape in shapes.items()}
