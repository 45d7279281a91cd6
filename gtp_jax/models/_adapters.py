"""The adapters of a run, as its checkpoints describe them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from flax import nnx

from ..nn import lora
from ..recipes import Recipe

_EXTRA = "lora"


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The arguments of `gtp_jax.nn.lora` with which a run added its adapters.

    Attributes:
        rank, alpha, targets, dropout: the arguments of these names.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0

    def on[M: nnx.Module](self, model: M, rngs: nnx.Rngs, recipe: Recipe | None = None) -> M:
        """Returns the model with these adapters added and all other weights frozen, as `gtp_jax.nn.lora` does."""
        options: Any = {"targets": self.targets, "dropout": self.dropout, "recipe": recipe}
        return lora(model, self.rank, self.alpha, rngs=rngs, **options)

    def extra(self) -> dict[str, Any]:
        """Returns the fields to save in a checkpoint's `extra`."""
        return {_EXTRA: dataclasses.asdict(self)}

    @classmethod
    def of(cls, extra: Mapping[str, Any], where: str) -> Self | None:
        """Returns the adapters that a checkpoint was saved with; `None` if it has none.

        Raises:
            ValueError: if this version does not understand their description.
        """
        fields = extra.get(_EXTRA)
        if fields is None:
            return None
        try:
            targets = fields["targets"]
            return cls(**{**fields, "targets": None if targets is None else tuple(targets)})
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"{where} has adapters that are described as {fields!r}, which this version does not know ({error}). "
                "Take the version that wrote it."
            ) from None
