"""Describes the tokens that an attention layer reaches, and how it is told their distance."""

from __future__ import annotations

import dataclasses

from ..ops import RopeScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """The window and the rotary embedding of a call of `Attention`. They may differ between calls, and between the
    layers of a `Stack`: for example, five of six layers have a window, and a rotary embedding of their own.

    Attributes:
        window: the size of the attention window, as in `Attention`; `None` for none.
        rope_theta: the base of the rotary wavelengths; `None` for no rotary embedding.
        rope_scaling: how the rotary frequencies are scaled, if at all.
    """

    window: int | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
