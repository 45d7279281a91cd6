"""A tensor of a Hugging Face model, and where it is among our parameters."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a Hugging Face model, and where it is among our parameters.

    A linear layer's weight is (out, in) there and (in, out) here, but for an expert's, which is (out, in) here too.
    Layers and experts are separate there, stacked here.

    Attributes:
        name: theirs.
        shape: theirs.
        path: of our array, joined by slashes, below `params`.
        layer: the row of our array that this is; `None` if it is the whole array.
        expert: the row of that row that this is, where experts are stacked too; `None` if it is the whole row.
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
        """Says whether its two dimensions change places."""
        return self.linear and self.expert is None

    @property
    def fused(self) -> str:
        """A name that linear weights share which are one matmul, with us and with other tools."""
        return f"{self.path.rpartition('kernel')[0]}{self.layer}"


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
