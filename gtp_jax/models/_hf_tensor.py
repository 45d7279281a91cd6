"""Describes the tensors of a Hugging Face model, and where each is in our parameters."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Within:
    """The place of a tensor within a larger one, in which Hugging Face's files store it together with others.

    Attributes:
        shape: the shape of the larger tensor.
        index: the index of the tensor in the larger one.
        transposed: whether the two dimensions that the index leaves are swapped.
    """

    shape: tuple[int, ...]
    index: tuple[int | slice, ...]
    transposed: bool = False

    def view(self, whole: np.ndarray) -> np.ndarray:
        """Returns the tensor, a view of the larger one."""
        part = whole[self.index]
        return part.T if self.transposed else part


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a Hugging Face model, and where it is in our parameters.

    The weight of a linear layer is (out, in) in Hugging Face's files and (in, out) in our arrays, except that an
    expert's weight is (out, in) in both. Layers and experts are separate tensors in their files and stacked in ours.

    Attributes:
        name: the name in Hugging Face's files; that of the larger tensor, if it is stored within one.
        shape: the shape in Hugging Face's files.
        path: the path of our array below `params`, joined by slashes.
        layer: the index of this tensor in the first dimension of our array; `None` if it is the whole array.
        expert: the index of this tensor in the second dimension, which stacks experts; `None` if experts are not
            stacked.
        linear: whether it is the weight of a linear layer.
        within: the place in a larger tensor; `None` if it is stored by itself.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    layer: int | None
    linear: bool
    expert: int | None = None
    within: Within | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in a file that contains this one."""
        return self.shape if self.within is None else self.within.shape

    def view(self, stored: np.ndarray) -> np.ndarray:
        """Returns this tensor, given the tensor in a file that contains it. The result shares its memory."""
        return stored if self.within is None else self.within.view(stored)

    @property
    def transposed(self) -> bool:
        """Whether the two dimensions are swapped between their tensor and our array."""
        return self.linear and self.expert is None

    @property
    def fused(self) -> str:
        """A name that linear weights share if one matmul multiplies the same tokens by them, here and in other tools.
        The gate and the up projection of an expert share one, which is no other expert's."""
        return f"{self.path.rpartition('kernel')[0]}{self.layer}.{self.expert}"


def in_files(tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Returns the tensors that files hold, each with the tensors that it contains: only itself, if it is none within
    another. Tensors that are stored within one are consecutive."""
    found = []
    for _, group in itertools.groupby(tensors, lambda tensor: tensor.name):
        own = list(group)
        first = own[0]
        whole = first if first.within is None else dataclasses.replace(first, shape=first.within.shape, within=None)
        found.append((whole, own))
    return found


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
