"""Sizes of all families by name."""

from __future__ import annotations

import difflib

from .llama import PRESETS, LlamaConfig


def preset_of(name: str) -> LlamaConfig:
    """Returns the configuration of a preset.

    Raises:
        ValueError: if there is none of the name.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown `preset` {name!r}; known are {', '.join(PRESETS)}.{hint}")
    return PRESETS[name]
