"""Returns the weights to evaluate a model with, from memory or from disk.

[Note: evaluation weights] An optimizer that averages weights has two sets. It computes gradients at the parameters, and
stores an array per parameter from which the evaluation weights are computed: the average itself (`AveragedState`), or
the sequence z of optax's schedule-free optimizers, with evaluation weights (params - (1 - b1) z) / b1. Both are
elementwise, so shards are not moved. A parameter without such an array, which the optimizer does not update, is itself
the evaluation weight. A checkpoint holds the whole state, and its `extra` records where these arrays are, so that
readers of a model do not need the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import optax.contrib

from ..checkpoint import Checkpoints, StoredArray, check_values
from ..mesh import Path, on_device, with_paths

Tree = Any

# The key in a checkpoint's `extra`.
_EVALUATION = "evaluation"
_PARAMS, _OPT_STATE = "params", "opt_state"


class AveragedState(NamedTuple):
    """The state of an optimizer that averages parameters.

    Attributes:
        steps: the number of updates made, int32.
        average: the moving average of the parameters that the optimizer updates, in float32 or wider; before the first
            update, these parameters.
        inner: the state of the optimizer that updates the parameters.
    """

    steps: jax.Array
    average: Tree
    inner: Tree


class _Place(NamedTuple):
    """The places in a state of the arrays from which evaluation weights are computed.

    Attributes:
        weights: the path of a tree. Each of its leaves has the path of its parameter.
        b1: the path of the scalar b1, if the tree is from a schedule-free optimizer; otherwise `None`.
    """

    weights: str
    b1: str | None


def evaluation_weights(params: Tree, opt_state: Tree) -> Tree:
    """Returns the weights to evaluate a model with: see [Note: evaluation weights]. No device communicates.

    Args:
        params: the parameters, as in `TrainState`.
        opt_state: the state of any optimizer, as in `TrainState`; for most, the parameters are the evaluation weights.
    """
    made = dict(with_paths(params))
    for _, node in _averages(opt_state):
        weights, b1 = (node.average, None) if isinstance(node, AveragedState) else (node.z, node.b1)
        for path, weight in with_paths(weights):
            trained = made[path]
            if b1 is not None:
                trained, weight = on_device((trained, weight))
            made[path] = _of(trained, weight, b1)
    return jax.tree.unflatten(jax.tree.structure(params), list(made.values()))


def saved_evaluation(opt_state: Tree) -> dict[str, Any]:
    """Returns what a checkpoint records in `extra` about its evaluation weights; empty if they are `params`."""
    places = []
    for path, node in _averages(opt_state):
        at = "/".join((_OPT_STATE, *path))
        averaged = isinstance(node, AveragedState)
        places.append(_Place(f"{at}/average", None) if averaged else _Place(f"{at}/z", f"{at}/b1"))
    return {_EVALUATION: [place._asdict() for place in places]} if places else {}


class EvaluationArray:
    """The evaluation weight of a parameter on disk, read row by row.

    Args:
        trained: the parameter that was trained.
        average: its average, or z; `None` if the parameter itself is the evaluation weight.
        b1: the b1 of a schedule-free optimizer; `None` otherwise.

    Attributes:
        shape: the logical shape of the parameter.
        stored: the arrays that are read, for `gtp_jax.checkpoint.check_values`.
    """

    def __init__(self, trained: StoredArray, average: StoredArray | None, b1: np.ndarray | None) -> None:
        self.shape, self._b1 = trained.shape, b1
        # An average replaces the trained parameter, which is then not read.
        self.stored = [array for array in (None if average and b1 is None else trained, average) if array is not None]

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns rows `begin` to `end`.

        Raises:
            ValueError, OSError: for the same reasons as `StoredArray.read`.
        """
        parts = [array.read(begin, end) for array in self.stored]
        return parts[0] if len(parts) == 1 else _of(parts[0], parts[1], self._b1)


def evaluation_arrays(checkpoints: Checkpoints, manifest: Mapping[str, Any]) -> dict[str, EvaluationArray]:
    """Returns the evaluation weights of a step by parameter name, without reading them.

    Args:
        checkpoints: the checkpoints that contain the step.
        manifest: the manifest of the step.

    Raises:
        ValueError, OSError: if the manifest names arrays for evaluation weights that the step does not have, if the b1
            of a schedule-free optimizer is damaged, or for the same reasons as `Checkpoints.arrays`.
    """
    arrays, prefix = checkpoints.arrays(manifest["step"]), f"{_PARAMS}/"
    found = {name: EvaluationArray(array, None, None) for name, array in arrays.items() if name.startswith(prefix)}
    for place, own in _places(manifest):
        b1 = None if place.b1 is None else _scalar(arrays[place.b1])
        for name in own:
            found[name] = EvaluationArray(arrays[name], arrays[_name_of_average(place, name)], b1)
    return found


def restore_evaluation_weights(checkpoints: Checkpoints, state_like: Any, manifest: Mapping[str, Any]) -> Tree:
    """Restores the evaluation weights onto the shardings of a state's parameters.

    Args:
        checkpoints: the checkpoints that contain the step.
        state_like: a `TrainState`, as for `Checkpoints.restore_params`.
        manifest: the manifest of the step.

    Raises:
        TypeError, ValueError, OSError: for the same reasons as `Checkpoints.restore_params` and `evaluation_arrays`.
    """
    step, arrays = manifest["step"], checkpoints.arrays(manifest["step"])
    made = dict(with_paths(checkpoints.restore_params(state_like, step)))
    names, padded = {"/".join((_PARAMS, *path)): path for path in made}, state_like.model_def.padded
    for place, own in _places(manifest):
        like: dict[str, Any] = {}
        for name in own:
            _put(like, tuple(_name_of_average(place, name).split("/")), made[names[name]])
        b1 = None if place.b1 is None else _scalar(arrays[place.b1])[0]
        averages = dict(with_paths(checkpoints.restore_part(like, f"{place.weights}/", step, padded)))
        for name in own:
            path = names[name]
            made[path] = _of(made[path], averages[tuple(_name_of_average(place, name).split("/"))], b1)
    return jax.tree.unflatten(jax.tree.structure(state_like.params), list(made.values()))


def _of(trained: Any, average: Any, b1: Any) -> Any:
    """Computes an evaluation weight, or some of its rows."""
    return average if b1 is None else (trained - (1.0 - b1) * average) / b1


def _averages(opt_state: Tree) -> list[tuple[Path, Any]]:
    """Returns the parts of an optimizer's state that average parameters, with their paths."""
    kinds = (AveragedState, optax.contrib.ScheduleFreeState)
    nodes = with_paths(opt_state, is_leaf=lambda node: isinstance(node, kinds))
    return [(path, node) for path, node in nodes if isinstance(node, kinds)]


def _places(manifest: Mapping[str, Any]) -> list[tuple[_Place, list[str]]]:
    """Returns the places that a manifest records for evaluation weights, each with the names of its parameters."""
    leaves, found = manifest["leaves"], []
    for said in manifest["extra"].get(_EVALUATION, ()):
        place = _Place(**said)
        own = [name for name in leaves if name.startswith(f"{_PARAMS}/") and _name_of_average(place, name) in leaves]
        if not own or (place.b1 is not None and place.b1 not in leaves):
            raise ValueError(
                f"step {manifest['step']} says that its evaluation weights are in {place.weights}, which it does not "
                "have. Use another step."
            )
        found.append((place, own))
    return found


def _name_of_average(place: _Place, name: str) -> str:
    return f"{place.weights}/{name.removeprefix(f'{_PARAMS}/')}"


def _scalar(array: StoredArray) -> np.ndarray:
    """Reads and checks a scalar, and returns it with shape (1,)."""
    value = array.read(0, 1)
    check_values([array])
    return value


def _put(tree: dict[str, Any], path: Path, leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf
