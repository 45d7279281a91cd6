"""Options that name a recipe, for command lines and settings files."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ..._words import GRAD_WIRE_NAMES, RECIPE_NAMES
from ._knobs import as_tuple, check_knobs, count_or, flag_of, knob

if TYPE_CHECKING:
    from ...recipes import Phases, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """Which parts of a model are quantized, and how; fields of `Recipe` have the same names here.

    Raises:
        ValueError: if a name is unknown or a value out of range.
    """

    recipe: str = knob(
        "bf16",
        "recipe",
        "what is quantized: weights on the wire, or also the operands of matmuls",
        kind=str,
        choices=RECIPE_NAMES,
    )
    high_precision_first: int = knob(
        0, "recipe", "number of first layers that stay in high precision", least=0, metavar="N"
    )
    high_precision_last: int = knob(
        0, "recipe", "number of last layers that stay in high precision", least=0, metavar="N"
    )
    override: tuple[str, ...] = knob(
        (),
        "recipe",
        "other recipes for modules with a matching path, such as mlp.down=mxfp8-matmuls; the first match applies",
        kind=str,
        metavar="PATTERN=RECIPE",
        nargs="+",
    )
    grad_wire: str | None = knob(
        None,
        "recipe",
        "exchange weight gradients in this format and sum them in float32 (default: determined by --grad-reduce)",
        kind=str,
        choices=GRAD_WIRE_NAMES,
    )
    pregathered_layers: int | Literal["all"] = knob(
        0,
        "recipe",
        "number of layers, from the first quantized one, whose codes are gathered once per step for all microbatches, "
        "or 'all'",
        kind=count_or("all"),
        metavar="N",
    )

    def __post_init__(self) -> None:
        as_tuple(self, "override")
        check_knobs(self)
        count = self.pregathered_layers
        if count != "all" and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise ValueError(
                f"`pregathered_layers` is {self.pregathered_layers!r}; it must be a number of layers, at least 0, or "
                "'all'."
            )
        if self.flags:
            self.to_recipe()  # checks the others

    def with_phases(self, texts: Sequence[str]) -> Phases:
        """Returns the recipe that these options name, and those that follow it, with the same other options.

        Args:
            texts: the first step and the name of each recipe, as STEP=RECIPE.

        Raises:
            ValueError: if a text is not of this form, or the steps do not ascend from 1 on.
        """
        from ...recipes import Phases

        begins = [(0, self.recipe), *map(begin_of_phase, texts)]
        starts = [start for start, _ in begins]
        if any(after <= before for before, after in itertools.pairwise(starts)):
            raise ValueError(
                f"`recipe_from` begins at the steps {', '.join(map(str, starts[1:]))}; each must be after the one "
                "before it, and the first after step 0, at which `recipe` begins."
            )
        recipes = tuple((start, dataclasses.replace(self, recipe=name).to_recipe()) for start, name in begins)
        try:
            return Phases(recipes)
        except ValueError as error:
            raise ValueError(str(error).replace("`recipes`", "`recipe_from`")) from error

    def to_recipe(self) -> Recipe:
        """Returns the recipe that these options name."""
        from ...recipes import RECIPES

        return dataclasses.replace(
            RECIPES[self.recipe](),
            high_precision_first=self.high_precision_first,
            high_precision_last=self.high_precision_last,
            override=tuple(_override(text) for text in self.override),
            grad_wire=self.grad_wire,
        )

    @property
    def summary(self) -> str:
        """The recipe and the options that differ from their defaults, in one line."""
        layers = [
            f"{end} {n}" for end, n in (("first", self.high_precision_first), ("last", self.high_precision_last)) if n
        ]
        parts = [
            self.recipe,
            *([f"{' and '.join(layers)} layers in high precision"] if layers else []),
            *self.override,
            *([f"gradients exchanged in {self.grad_wire}"] if self.grad_wire else []),
            *([f"codes of {self.pregathered_layers} layers gathered once per step"] if self.pregathered_layers else []),
        ]
        return ", ".join(parts)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that give these options, without those that have their defaults."""
        words: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words += [flag_of(field), *value] if isinstance(value, tuple) else [f"{flag_of(field)}={value}"]
        return tuple(words)


def begin_of_phase(text: str) -> tuple[int, str]:
    """Returns the first step of a phase and the name of its recipe, of STEP=RECIPE.

    Raises:
        ValueError: if the text is not of this form, or names no recipe.
    """
    start, _, name = text.partition("=")
    if not (start.isascii() and start.isdigit()) or name not in RECIPE_NAMES:
        raise ValueError(
            f"`recipe_from` has {text!r}; it must be STEP=RECIPE, such as 9000=bf16: the number of a step, and one of "
            f"{', '.join(RECIPE_NAMES)}."
        )
    return int(start), name


def _override(text: str) -> tuple[str, Recipe]:
    from ...recipes import RECIPES

    pattern, sign, name = text.partition("=")
    if not (pattern and sign):
        raise ValueError(
            f"`override` has {text!r}; it must be PATTERN=RECIPE, such as mlp.down=mxfp8-matmuls: the path of a "
            "module joined by dots, and one of the recipes."
        )
    if name not in RECIPES:
        raise ValueError(
            f"`override` has {text!r}, but {name!r} is not a recipe; it must be one of {', '.join(RECIPES)}."
        )
    return pattern, RECIPES[name]()
