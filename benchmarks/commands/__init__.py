"""Implements the topics of `gtp-jax bench`, each in a file of its own."""

from __future__ import annotations

from typing import Any

from . import _attention, _checkpoint, _collectives, _generate, _growth, _kernels, _recipes, _sequence, _step, _suite


def add_topics(topics: Any) -> None:
    """Adds all topics to `gtp-jax bench`."""
    for topic in (
        _step,
        _suite,
        _growth,
        _collectives,
        _sequence,
        _attention,
        _generate,
        _recipes,
        _kernels,
        _checkpoint,
    ):
        topic.add_topic(topics)
