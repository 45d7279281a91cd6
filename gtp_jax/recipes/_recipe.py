"""Recipes: shards of weights travel as codes and scales; matmuls run in the modules' dtype, or of rounded operands."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import formats
from ..formats import Format, Operands, WireFormat

# What a gradient may be exchanged in, to be summed in float32.
GRAD_WIRES: dict[str, Format | np.dtype] = {
    "bf16": np.dtype(jnp.bfloat16),
    "fp8": formats.FP8_E4M3,
    "mxfp8": formats.MXFP8,
}

_GRADIENTS = {"e5m2": formats.FP8_E5M2, "e4m3": formats.FP8_E4M3}

# Names of modules that stay in high precision unless a recipe says otherwise, where a model has them: embeddings and
# heads, as models call them.
EXCLUDED = ("*embed*", "wte", "*head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What of a model is quantized.

    Every weight is quantized once a step, from its float32 master, with one amax over all its shards; forward, backward
    and every microbatch use these values. Gradients flow straight through to the master (Bengio et al. 2013, arXiv
    1308.3432).

    Modules are chosen by patterns: names joined by dots, with wildcards (`*`, `?`), which match a module that has them
    in its path one after another, and all below it: `"mlp.down"`, `"attention"`, `"blocks.*.mlp"`. The first match of
    `override` counts, then `exclude`, and else the recipe itself.

    Attributes:
        exclude: patterns of modules whose weights stay in high precision. By default `"*embed*"`, `"wte"` and
            `"*head"`, where a model has them; name your own if they are called otherwise (`gtp_jax.explain` shows what
            becomes of them).
        high_precision_first: layers of a `Stack` that stay in high precision, from its first.
        high_precision_last: likewise, up to its last.
        override: pattern to the recipe of what matches, a mapping or pairs; of these recipes the formats and
            `grad_wire` count.
        grad_wire: `"bf16"`, `"fp8"` or `"mxfp8"`, in which each rank sends the others their shares of a layer's weight
            gradient, which they then add up in float32; see `gtp_jax.weights.exchange_gradients`. By default, and
            of what stays in high precision, as the modules' `grad_reduce` says.
    """

    exclude: tuple[str, ...] = EXCLUDED
    high_precision_first: int = 0
    high_precision_last: int = 0
    override: Mapping[str, Recipe] | tuple[tuple[str, Recipe], ...] = ()
    grad_wire: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.exclude, tuple | list) or not all(isinstance(name, str) for name in self.exclude):
            raise TypeError(
                f"`exclude` is {self.exclude!r}; it must be a tuple of names of modules, such as ('embed', 'head')."
            )
        object.__setattr__(self, "exclude", tuple(self.exclude))
        for name in ("high_precision_first", "high_precision_last"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"`{name}` is {count!r}; it must be a number of layers, at least 0.")
        try:
            pairs = tuple(dict(self.override).items())
        except (TypeError, ValueError):
            pairs = ((None, None),)
        for pattern, recipe in pairs:
            if not isinstance(pattern, str) or not isinstance(recipe, Recipe):
                raise TypeError(
                    f"`override` is {self.override!r}; it maps patterns of modules to recipes, such as "
                    "{'mlp.down': gtp_jax.MXFP8()}."
                )
            if recipe.override:
                raise ValueError(f"`override` of {pattern!r} has an override of its own; write all patterns in one.")
            if recipe.high_precision_first or recipe.high_precision_last or recipe.exclude not in (EXCLUDED, ()):
                raise ValueError(
                    f"`override` of {pattern!r} has a `exclude`, `high_precision_first` or `high_precision_last` of "
                    "its own, which would not count; layers are counted for a whole model, and modules named by its "
                    "own patterns."
                )
        if pairs and len(pairs) < len(self.override):
            raise ValueError(f"`override` is {self.override!r}, which has a pattern twice; write each once.")
        object.__setattr__(self, "override", pairs)
        if self.grad_wire is not None and self.grad_wire not in GRAD_WIRES:
            raise ValueError(
                f"`grad_wire` is {self.grad_wire!r}; it must be one of {', '.join(map(repr, GRAD_WIRES))}, or `None` "
                "for what the modules' `grad_reduce` says."
            )

    @property
    def wire(self) -> WireFormat | None:
        """Format of the weights on the wire; `None`: the modules' dtype. See `gtp_jax.weights.OwnFormat` for others."""
        return None

    @property
    def operands(self) -> Operands | None:
        """Formats of the matmuls' operands; `None`: matmuls run in the modules' dtype."""
        return None

    @property
    def reduction(self) -> Format | np.dtype | None:
        """In what weight gradients are exchanged, to be summed in float32; `None`: as modules' `grad_reduce` says."""
        return None if self.grad_wire is None else GRAD_WIRES[self.grad_wire]

    @property
    def rules(self) -> tuple[tuple[str, Recipe], ...]:
        """Patterns and the recipes of what they match; the first match counts."""
        assert isinstance(self.override, tuple)
        return (*self.override, *((name, BF16()) for name in self.exclude))

    @property
    def kinds(self) -> tuple[Recipe, ...]:
        """The recipe and those that override it."""
        return (self, *(recipe for _, recipe in self.rules))

    def describe(self) -> dict[str, Any]:
        """Returns the name and settings, for JSON."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        assert isinstance(self.override, tuple)
        found["override"] = {pattern: recipe.describe() for pattern, recipe in self.override}
        return {"name": type(self).__name__, **found}

    def of(self, path: Iterable[Any]) -> Recipe:
        """Returns the recipe of the module at `path`."""
        words = tuple(map(str, path))
        return next((recipe for pattern, recipe in self.rules if matches(pattern, words)), self)

    def wire_of(self, path: Iterable[Any]) -> WireFormat | None:
        """Returns the format of the weights of the module at `path`."""
        return self.of(path).wire

    def operands_of(self, path: Iterable[Any]) -> Operands | None:
        """Formats in which the module at `path` multiplies."""
        return self.of(path).operands

    def reduction_of(self, path: Iterable[Any]) -> Format | np.dtype | None:
        """Returns the format or dtype in which the gradient of the module at `path` is exchanged."""
        return self.of(path).reduction


def matches(pattern: str, words: tuple[str, ...]) -> bool:
    """Returns whether a path has the pattern's names one after another; see `Recipe`."""
    names = pattern.split(".")
    starts = range(len(words) - len(names) + 1)
    return any(all(fnmatch.fnmatchcase(w, n) for w, n in zip(words[i:], names, strict=False)) for i in starts)


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` is {value!r}; it must be True or False.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BF16(Recipe):
    """Nothing is quantized: weights travel in the modules' dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8(Recipe):
    """Weights travel as E4M3, scaled by their own amax (per-tensor current scaling): 1 byte an element.

    Attributes:
        matmuls: whether dense layers and experts multiply in FP8 too, forward and backward; see
            `gtp_jax.ops.linear_fp8` and `grouped_fp8`. Scales are then powers of two; each expert's kernels of a gather
            have one of their own.
        gradient: `"e5m2"` or `"e4m3"`, in which incoming gradients are multiplied.
    """

    matmuls: bool = False
    gradient: str = "e5m2"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_switch("matmuls", self.matmuls)
        if self.gradient not in _GRADIENTS:
            raise ValueError(f"`gradient` is {self.gradient!r}; it must be one of {', '.join(map(repr, _GRADIENTS))}.")

    @property
    def wire(self) -> Format:
        return formats.FP8_E4M3

    @property
    def operands(self) -> Operands | None:
        gradient = _GRADIENTS[self.gradient]
        both = formats.FP8_E4M3
        if not self.matmuls:
            return None
        return Operands(weight=both, activation=both, gradient=gradient)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """Weights travel as MXFP8 (OCP Microscaling Formats 1.0): E4M3 in blocks of 1 x 32, 1.031 bytes an element.

    Attributes:
        matmuls: whether dense layers and experts multiply MXFP8 by MXFP8 too, forward and backward: E4M3 everywhere,
            blocks along each contraction, scales rounded up (arXiv 2506.08027); see `gtp_jax.ops.linear_blocks` and
            `grouped_quantized`.
    """

    matmuls: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_switch("matmuls", self.matmuls)

    @property
    def wire(self) -> Format:
        return formats.MXFP8

    @property
    def operands(self) -> Operands | None:
        form = formats.MXFP8
        return Operands(weight=form, activation=form, gradient=form) if self.matmuls else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(Recipe):
    """Weights travel as NVFP4 (arXiv 2509.25149): E2M1 in blocks of 16 x 16, 0.504 bytes an element.

    Attributes:
        block: `(16, 16)`, or `(1, 16)` along the contraction, which is finer and takes 0.563 bytes.
        matmuls: whether dense layers and experts multiply NVFP4 by NVFP4 too, forward and backward: weights in 16 x 16,
            inputs and gradients in 1 x 16 along each contraction; see `gtp_jax.ops.linear_blocks` and
            `grouped_quantized`. The paper keeps about 15 % of the layers, most of them the last, in high precision:
            `high_precision_last`.
        hadamard: with `matmuls`, whether both operands of wgrad go through a 16 x 16 random Hadamard transform.
        stochastic: with `matmuls`, whether gradients are rounded stochastically.
    """

    block: tuple[int, int] = (16, 16)
    matmuls: bool = False
    hadamard: bool = True
    stochastic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if tuple(self.block) not in ((16, 16), (1, 16)):
            raise ValueError(f"`block` is {self.block!r}; it must be (16, 16) or (1, 16).")
        for name in ("matmuls", "hadamard", "stochastic"):
            _check_switch(name, getattr(self, name))
        if self.matmuls and tuple(self.block) != (16, 16):
            raise ValueError(
                "`matmuls` go with `block` (16, 16), so that forward and backward see one weight; leave `block` out."
            )

    @property
    def wire(self) -> Format:
        return formats.NVFP4 if tuple(self.block) == (16, 16) else formats.NVFP4_1D

    @property
    def operands(self) -> Operands | None:
        if not self.matmuls:
            return None
        form = formats.NVFP4_1D
        return Operands(
            weight=formats.NVFP4,
            activation=form,
            gradient=form,
            hadamard=self.hadamard,
            stochastic=self.stochastic,
        )


# By the name that the command line knows.
RECIPES: dict[str, Callable[[], Recipe]] = {
    "bf16": BF16,
    "fp8": FP8,
    "fp8-matmuls": lambda: FP8(matmuls=True),
    "mxfp8": MXFP8,
    "mxfp8-matmuls": lambda: MXFP8(matmuls=True),
    "nvfp4": NVFP4,
    "nvfp4-matmuls": lambda: NVFP4(matmuls=True),
}


def check_recipe(recipe: Any) -> None:
    """Raises TypeError unless it is a recipe or `None`."""
    if recipe is not None and not isinstance(recipe, Recipe):
        hint = " Write it with parentheses." if isinstance(recipe, type) and issubclass(recipe, Recipe) else ""
        known = ", ".join(f"gtp_jax.{kind.__name__}()" for kind in (BF16, FP8, MXFP8, NVFP4))
        raise TypeError(f"`recipe` is {recipe!r}; it must be one of {known}, or `None`.{hint}")
