"""Lists the recipes whose loss curves are compared, and deliberate mistakes that show how much each part of a
recipe contributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gtp_jax.recipes import FP8, MXFP8, NVFP4, RECIPES, Recipe


@dataclasses.dataclass(frozen=True)
class Variant:
    """A recipe to train with.

    Attributes:
        name: the name on the command line and in the picture.
        recipe: the library's recipe.
        mistake: a key of `MISTAKES` in `contenders/mistakes.py`, which is applied to the weights instead of the correct
            quantization; or empty.
        published: what the recipe's authors report about its loss.
        seed: a number added to the seed of the weights, but not of the text, to show the spread between seeds.
    """

    name: str
    recipe: Recipe
    mistake: str = ""
    published: str = ""
    seed: int = 0

    @property
    def wrong(self) -> bool:
        """Whether the variant omits a part of the published recipe, or does it wrong."""
        return bool(self.mistake) or "-no-" in self.name


_MXFP8 = "that of bf16 (8 B, 15 T tokens; 2506.08027)"
_NVFP4 = "+1 %, late +1.5 % (12 B, 10 T tokens; 2509.25149)"
_BLOCKS = "within 0.25 % of bf16 (16 B and 230 B, 1 T tokens; 2412.19437)"
_PUBLISHED = {"fp8-blocks": _BLOCKS, "mxfp8-matmuls": _MXFP8, "nvfp4-matmuls": _NVFP4}

_FOUND = [
    *(Variant(name, make(), published=_PUBLISHED.get(name, "")) for name, make in RECIPES.items()),
    Variant("bf16-seed1", RECIPES["bf16"](), seed=1),
    Variant("nvfp4-matmuls-last2", NVFP4(matmuls=True, high_precision_last=2), published=_NVFP4),
    Variant("fp8-matmuls-e4m3", FP8(matmuls=True, gradient="e4m3")),
    Variant("nvfp4-matmuls-mxfp8-down", NVFP4(matmuls=True, override={"mlp.down": MXFP8(matmuls=True)})),
    Variant("nvfp4-matmuls-no-hadamard", NVFP4(matmuls=True, hadamard=False)),
    Variant("nvfp4-matmuls-no-stochastic", NVFP4(matmuls=True, stochastic=False)),
    Variant("nvfp4-local-amax", RECIPES["bf16"](), mistake="local amax"),
    Variant("mxfp8-rounded-down", RECIPES["bf16"](), mistake="scales rounded down"),
]
# The first is bf16, with which the others are compared, followed by bf16 with another seed.
VARIANTS = {
    variant.name: variant for variant in sorted(_FOUND, key=lambda variant: not variant.name.startswith("bf16"))
}
# They show what sending or multiplying in each format costs, and the spread between seeds to compare it with.
HIGHLIGHTED = ("bf16-seed1", "fp8-matmuls", "mxfp8-matmuls", "nvfp4", "nvfp4-matmuls")
DEFAULT_VARIANTS = tuple(name for name in VARIANTS if name not in ("fp8-matmuls-e4m3", "nvfp4-matmuls-mxfp8-down"))


def chosen_variants(names: Sequence[str]) -> list[Variant]:
    """Returns the named variants, preceded by bf16, with which the others are compared.

    Raises:
        ValueError: if a name is unknown; the message lists the known ones.
    """
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"`recipes` contains {', '.join(unknown)}; the known recipes are {', '.join(VARIANTS)}.")
    return [VARIANTS[name] for name in dict.fromkeys(("bf16", *names))]
