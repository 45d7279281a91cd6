"""Holds the settings that loss curves must share to be comparable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gtp_jax.hlo import quantity
from gtp_jax.models import PRESETS, ModelConfig
from gtp_jax.runner.trainer import default_lr

# The default settings, by platform.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpu": {"preset": "100m", "steps": 3000, "seq": 512, "batch": 16},
    "cpu": {"preset": "tiny", "steps": 50, "seq": 64, "batch": 8},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurveSettings:
    """The model, text and length of a training run: the arguments of `contenders/curve.py` and the first record of its
    log.

    Attributes:
        preset: a key of `PRESETS`.
        head_dim: the width of an attention head; `None` for the preset's.
        parameters: the number of parameters of the model.
        steps: the number of optimizer steps.
        batch: the number of sequences per step.
        seq: the number of tokens per sequence.
        seed: the seed of the weights and of the order of the text; variants may add to the seed of the weights.
        lr: the peak learning rate.
        data: the paths of the text; if empty, Python's standard library is used.
        device: the kind of device it runs on.
    """

    preset: str
    steps: int
    batch: int
    seq: int
    seed: int
    lr: float
    head_dim: int | None = None
    data: tuple[str, ...] = ()
    device: str = ""
    parameters: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", tuple(self.data))  # JSON and argparse give a list
        if not self.parameters:
            object.__setattr__(self, "parameters", self.config.param_count())

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> CurveSettings:
        """Returns the settings in the first record of a log.

        Raises:
            ValueError: if their names are not those of these fields.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if names != set(settings):
            raise ValueError(
                f"a log has the settings {', '.join(sorted(settings))}, but {', '.join(sorted(names))} are expected: "
                "another version wrote it. Choose an empty folder with `--out`, or use the version that wrote it."
            )
        return cls(**settings)

    @property
    def config(self) -> ModelConfig:
        """The model."""
        preset = PRESETS[self.preset]
        return preset if self.head_dim is None else dataclasses.replace(preset, head_dim=self.head_dim)

    @property
    def flags(self) -> list[str]:
        """The flags of `contenders/curve.py`."""
        names = ("preset", "steps", "batch", "seq", "seed", "lr", "device")
        heads = [] if self.head_dim is None else [f"--head-dim={self.head_dim}"]
        data = ["--data", *self.data] if self.data else []
        return [*(f"--{name}={getattr(self, name)}" for name in names), *heads, *data]

    @property
    def title(self) -> str:
        """The settings in one line."""
        size = quantity(self.parameters, " parameters")
        tokens = f"{self.steps} steps of {self.batch} x {self.seq} tokens"
        heads = "" if self.head_dim is None else f", heads of {self.head_dim}"
        return f"{self.preset}{heads} ({size}), {tokens}, seed {self.seed}, {self.device}"

    def unlike(self, other: CurveSettings, name: str) -> str:
        """Returns a description of the differences from other settings, which are called `name`."""
        fields = (field.name for field in dataclasses.fields(self))
        pairs = ((field, getattr(self, field), getattr(other, field)) for field in fields)
        return ", ".join(f"{field} {mine} ({theirs} in {name})" for field, mine, theirs in pairs if mine != theirs)


def curve_settings(platform: str, **asked: Any) -> CurveSettings:
    """Returns settings in which `None` is replaced by the platform's default. The default of `lr` depends on the
    model's width."""
    defaults = _DEFAULTS["gpu" if platform in ("gpu", "cuda") else "cpu"]
    chosen = {**defaults, **{name: value for name, value in asked.items() if value is not None}}
    chosen.setdefault("lr", default_lr(PRESETS[chosen["preset"]].hidden_size))
    return CurveSettings(**chosen)
