"""Defines what an implementation of attention is, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ._masks import allowed_by, both, in_order


class Problem(NamedTuple):
    """Attention for which an implementation is chosen: the arguments of `attention`, after checks.

    Attributes:
        first: the position of the first query among the keys; `None` if masks need not depend on it.
        scale: the factor of the scores, a constant of the program.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    causal: bool
    window: int | None
    first: Any
    mask: jax.Array | None
    segment_ids: Any
    scale: float
    soft_cap: float | None
    sinks: jax.Array | None
    dropout_rate: float
    dropout_key: jax.Array | None

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of queries, and of keys."""
        return self.q.shape[1], self.k.shape[1]

    @property
    def scores(self) -> int:
        """The number of scores of a head."""
        return self.q.shape[1] * self.k.shape[1]

    @property
    def unseeing(self) -> bool:
        """Whether some query may have no key to attend to, not even its own."""
        queries, keys = self.sizes
        far = self.window is not None and queries >= keys + self.window  # the last query is that far from all keys
        return far or self.first is not None or self.mask is not None or isinstance(self.segment_ids, tuple)

    def masks(self) -> tuple[jax.Array | None, bool, int | None]:
        """Returns where queries may attend, in four dimensions, `None` for everywhere; and what of `causal` and
        `window` is left to apply."""
        allowed = allowed_by(self.mask, self.segment_ids)
        if self.first is None:
            return allowed, self.causal, self.window
        return both(allowed, in_order(*self.sizes, self.causal, self.window, self.first)), False, None


class DotProductAttention(NamedTuple):
    """An implementation of attention, a row of `TABLE`.

    Attributes:
        native: whether this is a kernel, rather than a reference.
        lacks: returns why a problem is not computed in this way on the current platform; an empty string if it is.
        run: computes the output, `(batch, queries, heads, head_dim)` in the dtype of `q`.
    """

    native: bool
    lacks: Callable[[Problem], str]
    run: Callable[[Problem], jax.Array]
