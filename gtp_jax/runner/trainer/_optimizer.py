"""Makes the optimizer and the learning-rate schedule of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import optax.contrib
from flax import nnx
from jax.sharding import Mesh

from ...mesh import with_paths
from ...nn import split_model
from ...optimizers import low_precision, muon
from ...recipes import EXCLUDED, matches
from ...train import per_layer
from ._average import averaged
from ._train_flags import TrainConfig

# The betas of AdamW, also for the parameters that Muon leaves to it.
_B1, _B2 = 0.9, 0.95

# The typical RMS of AdamW's updates in training, to which Muon's updates are scaled (arXiv 2502.16982).
_RMS_OF_ADAM = 0.2

# The names that Flax gives to vectors, which have several dimensions where heads or experts are counted.
_VECTORS = ("bias", "scale")


class _Parts(NamedTuple):
    """How an optimizer treats each parameter of a model: trees of the parameters' structure.

    Attributes:
        matrices: whether weight decay applies to each parameter: to matrices, but not to norm scales, biases and
            routers.
        kinds: `"hidden"` for the matrices within the layers, `"other"` for everything else: embedding, head, vectors.
        moved: whether the optimizer updates each parameter; false for those with their own update rules, such as the
            biases of routers.
    """

    matrices: Any
    kinds: Any
    moved: Any


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Returns a linear warm-up followed by the schedule that the configuration names. All but `constant` decay to a
    tenth of the peak."""
    peak, warmup, steps = config.peak_lr, config.warmup_steps, max(config.steps, config.warmup_steps + 1)
    first = peak / (warmup + 1)
    schedule = config.schedule_by_name
    if schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, peak, warmup, steps, end_value=peak / 10)
    rest = steps - warmup
    falling = {"constant": 0, "linear": rest, "wsd": max(1, rest // 5)}[schedule]
    parts = [optax.linear_schedule(first, peak, max(1, warmup)), optax.constant_schedule(peak)]
    ends = [warmup]
    if falling:
        parts.append(optax.linear_schedule(peak, peak / 10, falling))
        ends.append(steps - falling)
    return optax.join_schedules(parts, ends)


def on_this_process(schedule: optax.Schedule, step: int) -> float:
    """Returns a schedule's value, computed on a device of this process, which may have none in the mesh in scope."""
    with jax.set_mesh(Mesh(np.array(jax.local_devices()[:1]), ("local",))):
        return float(np.asarray(schedule(step)))


def optimizer_of(config: TrainConfig, model: nnx.Module) -> optax.GradientTransformation:
    """Returns the optimizer that the configuration names, with moments as it says, and a weight average if it asks for
    one.

    Weight decay applies only to matrices.
    """
    parts = _parts(model, of_others=config.model_ is not None)
    optimizer = _MAKERS[config.optimizer](learning_rate(config), config.weight_decay, parts)
    if config.optimizer_state != "float32":
        optimizer = low_precision(optimizer, moments=config.optimizer_state, seed=config.seed)
    return optimizer if config.average is None else averaged(optimizer, config.average, parts.moved)


def _parts(model: nnx.Module, *, of_others: bool) -> _Parts:
    """Returns how the optimizer treats the parameters of a model.

    Args:
        model: the model.
        of_others: whether it may have layers that are not ours. Their matrices are the parameters of two dimensions or
            more, except biases and scales.
    """
    # Matrices of ours are the gathered weights and the adapters; norm scales, biases and routers are not, even where a
    # stack of layers gives them two dimensions.
    model_def, params, _, _ = split_model(model)
    layouts, rules = model_def.layouts, model_def.update_rules
    adapters = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    is_leaf = lambda x: not isinstance(x, dict)  # noqa: E731
    listed = with_paths(layouts, is_leaf=is_leaf)
    stock = {
        path: leaf.ndim
        for path, leaf in with_paths(params)
        if of_others and leaf.ndim > 1 and path[-1] not in _VECTORS and path not in rules
    }
    matrices = [layout is not None or path in adapters or path in stock for path, layout in listed]
    hidden = [
        (layout is not None or stock.get(path) == 2) and not any(matches(pattern, path) for pattern in EXCLUDED)
        for path, layout in listed
    ]
    structure = jax.tree.structure(layouts, is_leaf=is_leaf)
    return _Parts(
        jax.tree.unflatten(structure, matrices),
        jax.tree.unflatten(structure, ["hidden" if one else "other" for one in hidden]),
        jax.tree.unflatten(structure, [path not in rules for path, _ in listed]),
    )


def _adamw(rate: optax.Schedule, decay: float, parts: _Parts) -> optax.GradientTransformation:
    return optax.adamw(rate, b1=_B1, b2=_B2, weight_decay=decay, mask=parts.matrices)


def _lion(rate: optax.Schedule, decay: float, parts: _Parts) -> optax.GradientTransformation:
    return optax.lion(rate, weight_decay=decay, mask=parts.matrices)


def _adafactor(rate: optax.Schedule, decay: float, parts: _Parts) -> optax.GradientTransformation:
    factored = per_layer(optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)))
    decayed = optax.add_decayed_weights(decay, parts.matrices)
    return optax.chain(factored, decayed, optax.scale_by_learning_rate(rate))


def _muon(rate: optax.Schedule, decay: float, parts: _Parts) -> optax.GradientTransformation:
    """Applies Muon to the matrices of each layer, with updates as large as AdamW's, and AdamW to everything else."""

    def dimensions(params: Any) -> Any:  # features in and out; a dimension before them counts experts
        return jax.tree.map(lambda p: optax.contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1), params)

    hidden = muon(rate, weight_decay=decay, muon_weight_dimension_numbers=dimensions, consistent_rms=_RMS_OF_ADAM)
    return optax.partition({"hidden": per_layer(hidden), "other": _adamw(rate, decay, parts)}, parts.kinds)


def _schedule_free(rate: optax.Schedule, decay: float, parts: _Parts) -> optax.GradientTransformation:
    """Like Optax's `schedule_free_adamw`, except that weight decay applies only to matrices."""
    free = optax.contrib.schedule_free(
        optax.chain(
            optax.scale_by_rms(decay=_B2, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(decay, parts.matrices),
            optax.scale_by_learning_rate(rate),
        ),
        rate,
        b1=_B1,
    )
    # Parameters with their own update rules are left out: this optimizer does not see their updates, and would average
    # them with their initial values.
    return optax.partition({True: free, False: optax.set_to_zero()}, parts.moved)


_MAKERS: Mapping[str, Callable[[optax.Schedule, float, _Parts], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
    "schedule-free": _schedule_free,
}
