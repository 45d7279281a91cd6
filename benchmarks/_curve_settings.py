"""Holds the settings that loss curves must share to be comparable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gtp_jax.hlo import quantity
from gtp_jax.models import PRESETS
from gtp_jax.runner.trainer import default_lr

# The default settings, by platform.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpu": {"preset": "100m", "steps": 3000, "seq": 512, "batch": 16},
    "cpu": {"preset": "tiny", "steps": 50, "seq": 64, "batch": 8},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveSettings:
    """Model, text and length of a training, as `contenders/curve.py` takes them and its log begins with them.

    Attributes:
        preset: a key of `PRESETS`.
        parameters: of the model.
        steps: of the optimizer.
        batch: sequences of a step.
        seq: tokens of a sequence.
        seed: of weights and order of the text; variants may add to that of the weights.
        lr: highest learning rate.
        data: paths of the text; none: Python's standard library.
        device: the kind it runs on.
    """

    preset: str
    steps: int
    batch: int
    seq: int
    seed: int
    lr: float
    data: tuple[str, ...] = ()
    device: str = ""
    parameters: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", tuple(self.data))  # a list, out of JSON or argparse
        if not self.parameters:
            object.__setattr__(self, "parameters", PRESETS[self.preset].param_count())

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CurveSettings:
        """Returns the settings that a log begins with.

        Raises:
            ValueError: if they are not these fields.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if names != set(settings):
            raise ValueError(
                f"a log's settings are {', '.join(sorted(settings))}, but {', '.join(sorted(names))} are expected: "
                "another version wrote it. Choose an empty folder with `--out`, or draw it with that version."
            )
        return cls(**settings)

    @property
    def flags(self) -> list[str]:
        """Flags of `contenders/curve.py`."""
        names = ("preset", "steps", "batch", "seq", "seed", "lr", "device")
        data = ["--data", *self.data] if self.data else []
        return [*(f"--{name}={getattr(self, name)}" for name in names), *data]

    @property
    def title(self) -> str:
        """The settings in one line."""
        size = quantity(self.parameters, " parameters")
        tokens = f"{self.steps} steps of {self.batch} x {self.seq} tokens"
        return f"{self.preset} ({size}), {tokens}, seed {self.seed}, {self.device}"

    def unlike(self, other: CurveSettings, name: str) -> str:
        """Returns what differs from another's, which has a name."""
        fields = (field.name for field in dataclasses.fields(self))
        pairs = ((field, getattr(self, field), getattr(other, field)) for field in fields)
        return ", ".join(f"{field} {mine} ({theirs} in {name})" for field, mine, theirs in pairs if mine != theirs)


def curve_settings(platform: str, **asked: Any) -> CurveSettings:
    """Returns settings of which `None` takes the platform's default; `lr` that of the model's width."""
    defaults = _DEFAULTS["gpu" if platform in ("gpu", "cuda") else "cpu"]
    chosen = {**defaults, **{name: value for name, value in asked.items() if value is not None}}
    chosen.setdefault("lr", default_lr(PRESETS[chosen["preset"]].hidden_size))
    return CurveSettings(**chosen)
