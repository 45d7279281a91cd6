"""Recipes: slices of weights travel as codes and scales; matmuls run in the modules' dtype, or in FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import formats
from ..formats import Format

# What a gradient may be exchanged in, to be summed in float32.
REDUCTIONS: dict[str, Format | np.dtype] = {
    "bf16": np.dtype(jnp.bfloat16),
    "fp8": formats.FP8_E4M3,
    "mxfp8": formats.MXFP8,
}

_GRADIENTS = {"e5m2": formats.FP8_E5M2, "e4m3": formats.FP8_E4M3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What of a model is quantized.

    Every weight is quantized once a step, from its float32 master, with one amax over all its slices; forward, backward
    and every microbatch use these values. Gradients flow straight through to the master (Bengio et al. 2013, arXiv
    1308.3432).

    Attributes:
        keep: names of modules whose weights stay in high precision, with all below them. By default the embedding and
            the head, where a Llama of this library has them.
        reduce: `"bf16"`, `"fp8"` or `"mxfp8"`, in which each rank sends the others their shares of a layer's weight
            gradient, which they then add up in float32; see `gtp_jax.collectives.exchange_gradients`. By default a
            reduce-scatter in the modules' `reduce_dtype`.
    """

    keep: tuple[str, ...] = ("embed", "head")
    reduce: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keep, str) or not all(isinstance(name, str) for name in self.keep):
            raise TypeError(f"`keep` is {self.keep!r}; it is a tuple of names of modules, such as ('embed', 'head').")
        if self.reduce is not None and self.reduce not in REDUCTIONS:
            raise ValueError(
                f"`reduce` is {self.reduce!r}; it is one of {', '.join(map(repr, REDUCTIONS))}, or `None` for a "
                "reduce-scatter."
            )

    @property
    def wire(self) -> Format | None:
        """Format of the weights on the wire; `None`: the modules' dtype."""
        return None

    @property
    def gradients(self) -> Format | None:
        """Format of the incoming gradients in FP8 matmuls; `None`: matmuls run in the modules' dtype."""
        return None

    def gradients_of(self, path: Iterable[Any]) -> Format | None:
        """The same for the module at `path`."""
        return None if set(map(str, path)) & set(self.keep) else self.gradients

    def wire_of(self, path: Iterable[Any]) -> Format | None:
        """Format of the weights of the module at `path`."""
        return None if set(map(str, path)) & set(self.keep) else self.wire

    def reduction_of(self, path: Iterable[Any]) -> Format | np.dtype | None:
        """In what the gradient of the module at `path` is exchanged; `None`: a reduce-scatter."""
        kept = self.reduce is None or set(map(str, path)) & set(self.keep)
        return None if kept else REDUCTIONS[str(self.reduce)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BF16(Recipe):
    """Nothing is quantized: weights travel in the modules' dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8(Recipe):
    """Weights travel as E4M3, scaled by their own amax (per-tensor current scaling): 1 byte an element.

    Attributes:
        matmuls: whether dense layers multiply in FP8 too, forward and backward; see `gtp_jax.ops.linear_fp8`. Scales
            are then powers of two. Experts multiply in the modules' dtype.
        gradient: `"e5m2"` or `"e4m3"`, in which incoming gradients are multiplied.
    """

    matmuls: bool = False
    gradient: str = "e5m2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.matmuls, bool):
            raise TypeError(f"`matmuls` is {self.matmuls!r}; it is True or False.")
        if self.gradient not in _GRADIENTS:
            raise ValueError(f"`gradient` is {self.gradient!r}; it is one of {', '.join(map(repr, _GRADIENTS))}.")

    @property
    def wire(self) -> Format:
        return formats.FP8_E4M3

    @property
    def gradients(self) -> Format | None:
        return _GRADIENTS[self.gradient] if self.matmuls else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """Weights travel as MXFP8 (OCP Microscaling Formats 1.0): E4M3 in blocks of 1 x 32, 1.031 bytes an element."""

    @property
    def wire(self) -> Format:
        return formats.MXFP8


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(Recipe):
    """Weights travel as NVFP4 (arXiv 2509.25149): E2M1 in blocks of 16 x 16, 0.504 bytes an element.

    Attributes:
        block: `(16, 16)`, or `(1, 16)` along the contraction, which is finer and takes 0.563 bytes.
    """

    block: tuple[int, int] = (16, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        if tuple(self.block) not in ((16, 16), (1, 16)):
            raise ValueError(f"`block` is {self.block!r}; it is (16, 16) or (1, 16).")

    @property
    def wire(self) -> Format:
        return formats.NVFP4 if tuple(self.block) == (16, 16) else formats.NVFP4_1D


# By the name that the command line knows.
RECIPES: dict[str, Callable[[], Recipe]] = {
    "bf16": BF16,
    "fp8": FP8,
    "fp8-matmuls": lambda: FP8(matmuls=True),
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
}


def check_recipe(recipe: Any) -> None:
    """Raises TypeError unless it is a recipe or `None`."""
    if recipe is not None and not isinstance(recipe, Recipe):
        hint = " Write it with parentheses." if isinstance(recipe, type) and issubclass(recipe, Recipe) else ""
        known = ", ".join(f"gtp_jax.{kind.__name__}()" for kind in (BF16, FP8, MXFP8, NVFP4))
        raise TypeError(f"`recipe` is {recipe!r}; it is one of {known}, or `None`.{hint}")
