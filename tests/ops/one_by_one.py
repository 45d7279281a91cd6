"""The oracle of attention: one query at a time, over the keys that it may see and no others."""

import jax.numpy as jnp
import numpy as np


def seen(b, i, keys, *, causal=False, window=None, mask=None, segment_ids=None):
    """The keys that query i of an example may attend to."""
    for j in range(keys):
        of_queries, of_keys = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        if causal and j > i:
            continue
        if window is not None and abs(i - j) >= window:
            continue
        if segment_ids is not None and of_queries[b, i] != of_keys[b, j]:
            continue
        if mask is not None and not np.asarray(mask if mask.ndim == 2 else mask[b])[i, j]:
            continue
        yield j


def one_by_one(q, k, v, *, scale=None, soft_cap=None, sinks=None, **where):
    """Attention, a query at a time."""
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    rows = []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            keys = list(seen(b, i, k.shape[1], **where))
            for h in range(q.shape[2]):
                if not keys:
                    rows.append(jnp.zeros(q.shape[-1]))
                    continue
                kv = h // (q.shape[2] // k.shape[2])
                scores = k[b, jnp.array(keys), kv] @ q[b, i, h] * scale
                if soft_cap is not None:
                    scores = soft_cap * jnp.tanh(scores / soft_cap)
                weights = jnp.exp(scores)
                total = jnp.sum(weights) + (0 if sinks is None else jnp.exp(sinks[h]))
                rows.append(weights / total @ v[b, jnp.array(keys), kv])
    return jnp.stack(rows).reshape(q.shape)
