"""How a model's experts are chosen, kept evenly loaded and reached, in words, as command lines have it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any, get_args

from ...experts import TRANSPORTS, AuxLossOf, Routing, Score, Transport
from ...models import LlamaConfig
from ._knobs import check_knobs, flag_of, knob

_GROUP = "experts"
ROUTER = "router_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """What differs from the preset's experts; `None` leaves it as it is there. Fields that begin with `router_` are
    those of `Routing`.

    Raises:
        ValueError: if a value is out of range.
    """

    top_k: int | None = knob(None, _GROUP, "experts a token (default: the preset's)", metavar="N")
    shared_hidden: int | None = knob(
        None, _GROUP, "hidden size of an MLP that every token goes through as well; 0 for none", least=0, metavar="N"
    )
    transport: Transport | None = knob(
        None, _GROUP, "how tokens travel over ep (default: what suits the devices)", kind=str, choices=TRANSPORTS
    )
    round_size: float | None = knob(
        None,
        _GROUP,
        "rows that a rank's experts multiply at once over ep, as a multiple of an even share (default: 1.25)",
        kind=float,
        above=0,
        metavar="X",
    )
    exchange_chunks: int | None = knob(
        None,
        _GROUP,
        "parts in which tokens travel over ep, one while experts multiply another (default: 1)",
        metavar="N",
    )
    aux_loss_coeff: float | None = knob(
        None, _GROUP, "weight of the term that keeps experts evenly loaded (default: the preset's)", kind=float
    )
    router_score: Score | None = knob(
        None, _GROUP, "of an expert, from its logit (default: softmax)", kind=str, choices=get_args(Score)
    )
    router_normalize: bool | None = knob(None, _GROUP, "divide a token's shares by their sum", kind=bool)
    router_scale: float | None = knob(
        None, _GROUP, "what shares are multiplied with (default: 1)", kind=float, above=0, metavar="X"
    )
    router_num_groups: int | None = knob(None, _GROUP, "groups of experts (default: 1)", metavar="N")
    router_top_groups: int | None = knob(None, _GROUP, "groups that a token takes experts of (default: 1)", metavar="N")
    router_bias_rate: float | None = knob(
        None,
        _GROUP,
        "how far a step moves each expert's bias towards even load; 0 only logs the load (default: no bias)",
        kind=float,
        metavar="RATE",
    )
    router_aux_loss: AuxLossOf | None = knob(
        None,
        _GROUP,
        "over what the term takes the load (default: sequence)",
        kind=str,
        choices=get_args(AuxLossOf),
    )
    router_z_loss_coeff: float | None = knob(
        None, _GROUP, "weight of the mean square of the logits' log-sum-exp (default: 0)", kind=float
    )

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not `None`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def flags(self, but: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the flags that say the same, but for some fields."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or field.name in but:
                continue
            flag = flag_of(field)
            words.append(f"--{'' if value else 'no-'}{flag[2:]}" if isinstance(value, bool) else f"{flag}={value}")
        return tuple(words)

    def of[C](self, config: C, preset: str | None, **sizes: Any) -> C:
        """Returns a configuration with these experts.

        Args:
            config: of the preset.
            preset: its name, for messages; `None` if it is of none.
            sizes: further fields that are not the preset's.

        Raises:
            ValueError: if the model has no experts, or cannot have them or the sizes like this.
        """
        given = self.given
        if not given and not sizes:
            return config
        if given and not (isinstance(config, LlamaConfig) and sizes.get("num_experts", config.num_experts)):
            flags = [flag_of(field) for field in dataclasses.fields(self) if field.name in given]
            whose = "model" if preset is None else f"preset {preset!r}"
            raise ValueError(
                f"`{next(iter(given))}` is {next(iter(given.values()))!r}, but the {whose} has no experts. Leave "
                f"{', '.join(flags)} out, or take a preset with experts, such as tiny-moe, or --num-experts."
            )
        assert isinstance(config, LlamaConfig)
        router = {name.removeprefix(ROUTER): given.pop(name) for name in list(given) if name.startswith(ROUTER)}
        try:
            routing = dataclasses.replace(config.routing or Routing(), **router)
            return dataclasses.replace(config, routing=routing, **given, **sizes)
        except ValueError as error:
            raise ValueError(_as_given(str(error))) from error


def _as_given(text: str) -> str:
    """Returns a message in which fields of `Routing` have the names that they have here."""
    ours = {field.name for field in dataclasses.fields(ExpertOptions)}
    return re.sub(r"`(\w+)`", lambda name: f"`{ROUTER}{name[1]}`" if ROUTER + name[1] in ours else name[0], text)
