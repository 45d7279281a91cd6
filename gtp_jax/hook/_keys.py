"""Gives sharded weights the keys of stochastic rounding, in the metadata of their variables."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from ..weights import Beside, CallKeys, Stored, key_for
from ._path import path_of
from ._placement import placement_of


def with_keys[M: nnx.Module](model: M, key: jax.Array) -> M:
    """Gives each sharded weight of a model a key of its own, and returns the model.

    Args:
        model: the model, which is changed. It must not outlive the trace of `key`.
        key: the key of this step, microbatch and rank, uint32 `(2,)`.
    """
    for _, variable in nnx.iter_graph(model):
        if placement_of(variable) is not None:
            keys = CallKeys(key_for(key, path_of(variable)))
            variable.set_metadata(rounding=Beside(Stored(variable.get_raw_value(), (), keys=keys)))
    return model


def keys_of_call(variable: Any) -> CallKeys | None:
    """Returns the keys of the current call for a weight, one for each of its products; `None` if the weight has
    none."""
    beside = variable.get_metadata().get("rounding")
    keys = None if beside is None else beside.of(variable.get_raw_value()).keys
    return None if keys is None else keys.for_view()
