"""The oracle of attention: one query at a time, over the keys that it may see and no others."""

import jax
import jax.numpy as jnp
import numpy as np


def seen(b, i, keys, *, causal=False, window=None, mask=None, segment_ids=None, query_position=0):
    """The keys that query i of an example may attend to."""
    at = i + (query_position[b] if np.ndim(query_position) else query_position)
    for j in range(keys):
        of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        if causal and j > at:
            continue
        if window is not None and abs(at - j) >= window:
            continue
        if segment_ids is not None and of_queries[b, i] != of_keys[b, j]:
            continue
        if mask is not None:
            own = np.asarray(mask if mask.ndim == 2 else mask[b])
            if not own[i if len(own) > 1 else 0, j]:
                continue
        yield j


def one_by_one(q, k, v, *, scale=None, soft_cap=None, sinks=None, **where):
    """Attention, a query at a time: in NumPy if it is given NumPy's arrays, else in JAX, which derives it."""
    numpy = np if isinstance(q, np.ndarray) else jnp
    where = {name: jax.tree.map(np.asarray, value) for name, value in where.items()}
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    of_head = np.arange(q.shape[2]) // (q.shape[2] // k.shape[2])  # the key-value head of each head
    rows = []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            keys = list(seen(b, i, k.shape[1], **where))
            if not keys:
                rows.append(numpy.zeros(q.shape[2:]))
                continue
            own_k, own_v = (t[b, np.array(keys)][:, of_head] for t in (k, v))
            scores = numpy.einsum("hd,khd->hk", q[b, i], own_k) * scale
            if soft_cap is not None:
                scores = soft_cap * numpy.tanh(scores / soft_cap)
            weights = numpy.exp(scores)
            total = numpy.sum(weights, -1) + (0 if sinks is None else numpy.exp(sinks))
            rows.append(numpy.einsum("hk,khd->hd", weights / total[:, None], own_v))
    return numpy.stack(rows).reshape(q.shape)
