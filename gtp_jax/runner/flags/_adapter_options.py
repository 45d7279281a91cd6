"""Options of low-rank adapters, for command lines and settings files."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ._knobs import as_tuple, check_knobs, knob

if TYPE_CHECKING:
    from ...models import Adapters

_GROUP = "adapters"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Which adapters are trained instead of the model, if any; see `gtp_jax.nn.lora`.

    Raises:
        ValueError: if a value is out of range, or options of adapters are given without a rank.
    """

    lora: int | None = knob(
        None,
        _GROUP,
        "train adapters of this rank; the model of --from is frozen, in the format of --recipe",
        metavar="RANK",
    )
    lora_alpha: float | None = knob(
        None,
        _GROUP,
        "scale the output of adapters by X / RANK (default: twice the rank)",
        kind=float,
        above=0,
        metavar="X",
    )
    lora_dropout: float = knob(
        0.0, _GROUP, "fraction of an adapter's input that is dropped in training", kind=float, metavar="P"
    )
    lora_targets: tuple[str, ...] = knob(
        (),
        _GROUP,
        "projections that get an adapter, such as query mlp.down (default: all of attention and MLP)",
        kind=str,
        metavar="PATTERN",
        nargs="+",
    )

    def __post_init__(self) -> None:
        as_tuple(self, "lora_targets")
        check_knobs(self)
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"`lora_dropout` is {self.lora_dropout}; it must be a number of at least 0 and below 1.")
        given = [
            f"--{name.replace('_', '-')}"
            for name in ("lora_alpha", "lora_dropout", "lora_targets")
            if getattr(self, name)
        ]
        if self.lora is None and given:
            raise ValueError(f"{', '.join(given)}: this applies only to adapters. Give their rank, such as --lora 8.")

    @property
    def adapters(self) -> Adapters | None:
        """The adapters; `None` if the model itself is trained."""
        if self.lora is None:
            return None
        from ...models import Adapters

        alpha = 2.0 * self.lora if self.lora_alpha is None else float(self.lora_alpha)
        return Adapters(self.lora, alpha, self.lora_targets or None, float(self.lora_dropout))
