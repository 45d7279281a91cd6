"""Options of a model's experts for command lines: how they are chosen, balanced and reached over ep."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any, get_args

from ..._words import TRANSPORTS, AuxLossOf, Score, Transport
from ._knobs import check_knobs, flag_of, knob

_GROUP = "experts"
ROUTER = "router_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Options of experts that differ from the preset's; `None` keeps the preset's.

    Fields that begin with `router_` are fields of `Routing`.

    Raises:
        ValueError: if a value is out of range.
    """

    top_k: int | None = knob(None, _GROUP, "number of experts per token (default: the preset's)", metavar="N")
    shared_hidden: int | None = knob(
        None, _GROUP, "hidden size of the shared MLP, which every token also uses; 0 for none", least=0, metavar="N"
    )
    transport: Transport | None = knob(
        None, _GROUP, "how tokens are sent over ep (default: depends on the devices)", kind=str, choices=TRANSPORTS
    )
    round_size: float | None = knob(
        None,
        _GROUP,
        "number of rows that a rank's experts multiply per round over ep, as a multiple of an even share (default: "
        "1.25)",
        kind=float,
        above=0,
        metavar="X",
    )
    exchange_chunks: int | None = knob(
        None,
        _GROUP,
        "number of parts in which tokens are sent over ep: one is sent while experts multiply another (default: 1)",
        metavar="N",
    )
    aux_loss_coeff: float | None = knob(
        None, _GROUP, "weight of the load-balancing loss (default: the preset's)", kind=float
    )
    router_score: Score | None = knob(
        None,
        _GROUP,
        "function that computes an expert's score from its logit (default: softmax)",
        kind=str,
        choices=get_args(Score),
    )
    router_normalize: bool | None = knob(None, _GROUP, "divide a token's routing weights by their sum", kind=bool)
    router_scale: float | None = knob(
        None, _GROUP, "factor that multiplies the routing weights (default: 1)", kind=float, above=0, metavar="X"
    )
    router_num_groups: int | None = knob(None, _GROUP, "number of groups of experts (default: 1)", metavar="N")
    router_top_groups: int | None = knob(
        None, _GROUP, "number of groups from which a token's experts are chosen (default: 1)", metavar="N"
    )
    router_bias_rate: float | None = knob(
        None,
        _GROUP,
        "how far a step moves each expert's bias towards an even load; 0 only logs the load (default: no bias)",
        kind=float,
        metavar="RATE",
    )
    router_aux_loss: AuxLossOf | None = knob(
        None,
        _GROUP,
        "tokens over which the load-balancing loss measures the load (default: sequence)",
        kind=str,
        choices=get_args(AuxLossOf),
    )
    router_z_loss_coeff: float | None = knob(
        None, _GROUP, "weight of the z-loss, the mean square of the logits' log-sum-exp (default: 0)", kind=float
    )

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not `None`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def flags(self, but: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the flags that give these options, except those of the fields in `but`."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or field.name in but:
                continue
            flag = flag_of(field)
            words.append(f"--{'' if value else 'no-'}{flag[2:]}" if isinstance(value, bool) else f"{flag}={value}")
        return tuple(words)

    def of[C](self, config: C, preset: str | None, **sizes: Any) -> C:
        """Returns a configuration with these options.

        Args:
            config: the configuration of the preset.
            preset: the name of the preset, for messages; `None` if there is none.
            sizes: other fields that differ from the preset's.

        Raises:
            ValueError: if the model has no experts, or its configuration refuses the options or the sizes.
        """
        given = self.given
        if not given and not sizes:
            return config
        from ...experts import Routing
        from ...models import LlamaConfig

        if given and not (isinstance(config, LlamaConfig) and sizes.get("num_experts", config.num_experts)):
            flags = [flag_of(field) for field in dataclasses.fields(self) if field.name in given]
            whose = "model" if preset is None else f"preset {preset!r}"
            raise ValueError(
                f"`{next(iter(given))}` is {next(iter(given.values()))!r}, but the {whose} has no experts. Leave "
                f"{', '.join(flags)} out, or use a preset with experts, such as tiny-moe, or --num-experts."
            )
        assert isinstance(config, LlamaConfig)
        router = {name.removeprefix(ROUTER): given.pop(name) for name in list(given) if name.startswith(ROUTER)}
        try:
            routing = dataclasses.replace(config.routing or Routing(), **router)
            return dataclasses.replace(config, routing=routing, **given, **sizes)
        except ValueError as error:
            raise ValueError(_as_given(str(error))) from error


def _as_given(text: str) -> str:
    """Replaces the names of `Routing`'s fields in a message by their names in `ExpertOptions`."""
    ours = {field.name for field in dataclasses.fields(ExpertOptions)}
    return re.sub(r"`(\w+)`", lambda name: f"`{ROUTER}{name[1]}`" if ROUTER + name[1] in ours else name[0], text)
