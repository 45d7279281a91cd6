"""Selects contenders and kernels by words of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Named(Protocol):
    """Anything whose name consists of words."""

    @property
    def name(self) -> str:
        """The name shown in tables."""
        ...


def by_words[T: Named](items: Iterable[T], only: Sequence[str], noun: str) -> list[T]:
    """Returns the items whose names contain all the words of one entry of `only`, ignoring case; all items if `only` is
    empty.

    Raises:
        ValueError: if no item matches.
    """
    known = list(items)
    if not only:
        return known
    wanted = [set(words.lower().split()) for words in only]
    chosen = [item for item in known if any(words <= set(item.name.lower().split()) for words in wanted)]
    if not chosen:
        raise ValueError(f"no {noun} is called {' or '.join(only)}; there are {', '.join(i.name for i in known)}.")
    return chosen
