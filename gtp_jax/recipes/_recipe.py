"""Recipes: the formats in which weights are sent, operands of matmuls are rounded, and gradients are exchanged."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import formats
from ..formats import DelayedScaling, Format, Operands, WireFormat

# The formats and dtypes in which gradients may be exchanged; they are summed in float32.
GRAD_WIRES: dict[str, Format | np.dtype] = {
    "bf16": np.dtype(jnp.bfloat16),
    "fp8": formats.FP8_E4M3,
    "mxfp8": formats.MXFP8,
}

_GRADIENTS = {"e5m2": formats.FP8_E5M2, "e4m3": formats.FP8_E4M3}

# Patterns of the modules that stay in high precision unless a recipe says otherwise: the usual names of embeddings and
# heads.
EXCLUDED = ("*embed*", "wte", "*head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Defines which weights of a model are quantized, and how.

    `train_step` quantizes every weight once per step, from its master; if the format has an amax, it is taken over all
    shards. Forward, backward and every microbatch use the same codes. (Under `use_recipe`, every call of a module
    quantizes.) Gradients flow to the master through a straight-through estimator (Bengio et al. 2013, arXiv
    1308.3432).

    Modules are chosen by patterns: names joined by dots, with wildcards (`*`, `?`), such as `"mlp.down"`,
    `"attention"` or `"blocks.*.mlp"`. A pattern matches every module whose path contains its names consecutively, and
    thus also the modules below it. The first match in `override` applies, otherwise the first in `exclude`, otherwise
    the recipe itself.

    Attributes:
        exclude: patterns of the modules whose weights stay in high precision. The default, `"*embed*"`, `"wte"` and
            `"*head"`, covers the usual names of embeddings and heads; if your modules have other names, list them
            (`gtp_jax.explain` shows how each module is treated).
        high_precision_first: how many layers at the start of a `Stack` stay in high precision, whatever patterns match.
        high_precision_last: the same for the end of a `Stack`.
        override: a mapping, or pairs, from patterns to the recipes of the modules they match. Only the formats and the
            `grad_wire` of these recipes are used.
        grad_wire: the format in which ranks exchange weight gradients, `"bf16"`, `"fp8"` or `"mxfp8"`. Each rank sends
            to every other rank the part of a layer's gradient that the other stores, and sums the parts that it
            receives in float32; see `gtp_jax.weights.exchange_gradients`. The modules' `grad_reduce` applies if it is
            `None`, to modules in `exclude`, and to layers in `high_precision_first` and `high_precision_last`.
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
                    f"`override` is {self.override!r}; it must map patterns of modules to recipes, such as "
                    "{'mlp.down': gtp_jax.MXFP8()}."
                )
            if recipe.override:
                raise ValueError(f"`override` of {pattern!r} has an override of its own; combine them into one.")
            if recipe.high_precision_first or recipe.high_precision_last or recipe.exclude not in (EXCLUDED, ()):
                raise ValueError(
                    f"`override` of {pattern!r} has an `exclude`, `high_precision_first` or `high_precision_last` of "
                    "its own, which would have no effect. Set them in the recipe of the whole model."
                )
        if pairs and len(pairs) < len(self.override):
            raise ValueError(f"`override` is {self.override!r}, which has a pattern twice; write each once.")
        object.__setattr__(self, "override", pairs)
        if self.grad_wire is not None and self.grad_wire not in tuple(GRAD_WIRES):  # a list has no hash
            raise ValueError(
                f"`grad_wire` is {self.grad_wire!r}; it must be one of {', '.join(map(repr, GRAD_WIRES))}, or `None` "
                "to use the modules' `grad_reduce`."
            )

    @property
    def wire(self) -> WireFormat | None:
        """The format of the weights on the wire; `None` for the modules' dtype.

        See `gtp_jax.weights.OwnFormat` for custom formats.
        """
        return None

    @property
    def operands(self) -> Operands | None:
        """The formats of the matmuls' operands; `None` if matmuls run in the modules' dtype."""
        return None

    @property
    def reduction(self) -> Format | np.dtype | None:
        """The format or dtype in which weight gradients are exchanged; `None` for the modules' `grad_reduce`.

        They are summed in float32.
        """
        return None if self.grad_wire is None else GRAD_WIRES[self.grad_wire]

    @property
    def rules(self) -> tuple[tuple[str, Recipe], ...]:
        """The patterns and the recipes of the modules they match; the first match applies."""
        assert isinstance(self.override, tuple)
        return (*self.override, *((name, BF16()) for name in self.exclude))

    @property
    def kinds(self) -> tuple[Recipe, ...]:
        """The recipe itself and the recipes of all `rules`."""
        return (self, *(recipe for _, recipe in self.rules))

    @property
    def delays(self) -> bool:
        """Whether any of `kinds` scales by amaxes of earlier steps, which `TrainState.scaling` holds."""
        return any(kind.operands is not None and kind.operands.delayed is not None for kind in self.kinds)

    def describe(self) -> dict[str, Any]:
        """Returns the recipe's name and settings, for JSON."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        assert isinstance(self.override, tuple)
        found["override"] = {pattern: recipe.describe() for pattern, recipe in self.override}
        return {"name": type(self).__name__, **found}

    def of(self, path: Iterable[Any]) -> Recipe:
        """Returns the recipe of the module at `path`."""
        return self.rule_of([path])[1]

    def rule_of(self, paths: Iterable[Iterable[Any]]) -> tuple[str | None, Recipe]:
        """Returns the first of `rules` whose pattern matches one of the paths of a module or weight; `None` and the
        recipe itself if no pattern matches."""
        words = [tuple(map(str, path)) for path in paths]
        return next((rule for rule in self.rules if any(matches(rule[0], one) for one in words)), (None, self))


def matches(pattern: str, words: tuple[str, ...]) -> bool:
    """Returns whether a path contains the pattern's names consecutively; see `Recipe`."""
    names = pattern.split(".")
    starts = range(len(words) - len(names) + 1)
    return any(all(fnmatch.fnmatchcase(w, n) for w, n in zip(words[i:], names, strict=False)) for i in starts)


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` is {value!r}; it must be True or False.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BF16(Recipe):
    """Quantizes nothing: weights travel in the modules' dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8(Recipe):
    """Sends weights as E4M3, scaled by their own amax (per-tensor current scaling): 1 byte per element.

    Attributes:
        matmuls: whether dense layers and experts also multiply in FP8, forward and backward; see
            `gtp_jax.ops.linear_fp8` and `grouped_fp8`. Scales are then powers of two, and all kernels of one expert
            that are gathered together share a scale.
        gradient: the format of incoming gradients in matmuls, `"e5m2"` or `"e4m3"`.
        attention: with `matmuls`, whether `gtp_jax.Attention` and `CrossAttention` also multiply in FP8, in forward
            only; see `gtp_jax.ops.attention_fp8`. The recipe of the projection `out` decides. Windows, masks, segments,
            soft caps, sinks and dropout are not supported.
        keep_codes: with `matmuls`, whether forward also makes the codes of dense layers' inputs that wgrad multiplies.
            Remat policies that save matmuls save them, 1 byte per element, so that backward neither computes the inputs
            again nor quantizes them; without remat, they are saved instead of the inputs. `None` makes them where they
            are then saved on the device: under `"matmuls"`, `"activations"` and `"everything"`, and without remat.
            Under other policies, `True` makes them in vain. Results do not change.
    """

    matmuls: bool = False
    gradient: str = "e5m2"
    attention: bool = False
    keep_codes: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_switch("matmuls", self.matmuls)
        _check_switch("attention", self.attention)
        if not isinstance(self.keep_codes, bool | None):
            raise TypeError(f"`keep_codes` is {self.keep_codes!r}; it must be True, False or None.")
        for name in ("attention", "keep_codes"):
            if getattr(self, name) and not self.matmuls:
                raise ValueError(f"`{name}` requires `matmuls=True`; pass that too, or leave `{name}` out.")
        if self.gradient not in tuple(_GRADIENTS):
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
        return Operands(
            weight=both, activation=both, gradient=gradient, attention=self.attention, keep_codes=self.keep_codes
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8Blocks(Recipe):
    """Sends weights as E4M3 in tiles of 128 x 128, 1 byte per element, and multiplies them in FP8, as DeepSeek-V3 was
    trained (arXiv 2412.19437).

    Inputs and gradients are E4M3 too, in runs of 1 x 128 along each product's contraction. Scales are powers of two,
    and sums are promoted to float32 every 128 elements; see `gtp_jax.ops.linear_fp8_blocks`. Each expert's kernel has
    tiles of its own, and each expert's tokens begin a run. On Hopper, kernels of this library multiply experts' codes;
    elsewhere, the rounded values are multiplied in the modules' dtype with float32 sums; see
    `gtp_jax.ops.grouped_quantized`. Only dense layers, experts, and models that `gtp_jax.shard` has sharded multiply in
    tiles; name other modules in `exclude` or `override`.
    """

    @property
    def wire(self) -> WireFormat:
        return formats.Tiled(format=formats.FP8_BLOCKS)

    @property
    def operands(self) -> Operands:
        form = formats.FP8_BLOCKS_1D
        return Operands(weight=formats.FP8_BLOCKS, activation=form, gradient=form)


_ALGORITHMS = ("max", "most_recent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8Delayed(Recipe):
    """Sends weights as E4M3, 1 byte per element, and multiplies them in FP8 with scales that follow from the amaxes of
    earlier steps, as TransformerEngine's `DelayedScaling` does.

    Inputs and weights are E4M3, gradients E5M2, each with one scale in float32. The state of a step holds the scales
    and the amaxes (`TrainState.scaling`): pass the recipe to `TrainState.create` too. A value beyond `2**margin` times
    the amax that set its scale saturates, except that weights which the loss enlarges by more than 1/16 have their own
    amaxes. Only dense layers multiply like this; name experts and other modules in `exclude` or `override`.

    Attributes:
        history: the number of steps whose amaxes are kept.
        algorithm: the amax that sets the scale: `"max"`, the largest of the history, or `"most_recent"`.
        margin: scales leave room for amaxes that are `2**margin` times as large.
    """

    history: int = 1024
    algorithm: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.history, int) or isinstance(self.history, bool) or self.history < 1:
            raise ValueError(f"`history` is {self.history!r}; it must be a number of steps, at least 1.")
        if self.algorithm not in _ALGORITHMS:
            raise ValueError(
                f"`algorithm` is {self.algorithm!r}; it must be one of {', '.join(map(repr, _ALGORITHMS))}."
            )
        if not isinstance(self.margin, int) or isinstance(self.margin, bool) or not 0 <= self.margin <= 16:
            raise ValueError(f"`margin` is {self.margin!r}; it must be a whole number from 0 to 16.")

    @property
    def wire(self) -> Format:
        return formats.FP8_E4M3

    @property
    def operands(self) -> Operands:
        both = formats.FP8_E4M3
        delayed = DelayedScaling(history=self.history, algorithm=self.algorithm, margin=self.margin)
        return Operands(weight=both, activation=both, gradient=formats.FP8_E5M2, delayed=delayed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(Recipe):
    """Sends weights as MXFP8 (OCP Microscaling Formats 1.0): E4M3 in blocks of 1 x 32, 1.031 bytes per element.

    Attributes:
        matmuls: whether dense layers and experts also multiply MXFP8 by MXFP8, forward and backward. All operands are
            E4M3, with blocks along each contraction and scales rounded up (arXiv 2506.08027); see
            `gtp_jax.ops.linear_blocks` and `grouped_quantized`.
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
    """Sends weights as NVFP4 (arXiv 2509.25149): E2M1 in blocks of 16 x 16, 0.504 bytes per element.

    Attributes:
        block: the shape of the blocks: `(16, 16)`, or `(1, 16)` along the contraction, which is finer and takes 0.563
            bytes per element.
        matmuls: whether dense layers and experts also multiply NVFP4 by NVFP4, forward and backward. Weights are in
            blocks of 16 x 16, inputs and gradients in blocks of 1 x 16 along each contraction; see
            `gtp_jax.ops.linear_blocks` and `grouped_quantized`. The paper keeps about 15 % of the layers, most of them
            the last, in high precision; use `high_precision_last`.
        hadamard: with `matmuls`, whether a 16 x 16 random Hadamard transform is applied to both operands of wgrad.
        stochastic: with `matmuls`, whether gradients are rounded stochastically.
    """

    block: tuple[int, int] = (16, 16)
    matmuls: bool = False
    hadamard: bool = True
    stochastic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        block = tuple(self.block) if isinstance(self.block, tuple | list) else None
        if block not in ((16, 16), (1, 16)):
            raise ValueError(f"`block` is {self.block!r}; it must be (16, 16) or (1, 16).")
        object.__setattr__(self, "block", block)
        for name in ("matmuls", "hadamard", "stochastic"):
            _check_switch(name, getattr(self, name))
        if self.matmuls and self.block != (16, 16):
            raise ValueError(
                "`matmuls` requires `block` (16, 16), so that forward and backward see the same weight; leave `block` "
                "out."
            )

    @property
    def wire(self) -> Format:
        return formats.NVFP4 if self.block == (16, 16) else formats.NVFP4_1D

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


# The recipes by their names on the command line.
RECIPES: dict[str, Callable[[], Recipe]] = {
    "bf16": BF16,
    "fp8": FP8,
    "fp8-matmuls": lambda: FP8(matmuls=True),
    "fp8-attention": lambda: FP8(matmuls=True, attention=True),
    "fp8-keep-codes": lambda: FP8(matmuls=True, keep_codes=True),
    "fp8-delayed": FP8Delayed,
    "fp8-blocks": FP8Blocks,
    "mxfp8": MXFP8,
    "mxfp8-matmuls": lambda: MXFP8(matmuls=True),
    "nvfp4": NVFP4,
    "nvfp4-matmuls": lambda: NVFP4(matmuls=True),
}
