"""The optimizer of a training run, and its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib
from flax import nnx

from ...mesh import with_paths
from ...nn import split_model
from ...recipes import EXCLUDED, matches
from ...train import per_layer
from ._average import averaged
from ._train_flags import TrainConfig

# Betas of AdamW, also for what Muon leaves to it.
_B1, _B2 = 0.9, 0.95

# The size of AdamW's updates in training, as Muon is scaled to (arXiv 2502.16982).
_RMS_OF_ADAM = 0.2


class _Parts(NamedTuple):
    """What an optimizer knows of a model: trees of its parameters.

    Attributes:
        matrices: whether each parameter is decayed: matrices are, norm scales, biases and routers are not.
        kinds: `"hidden"` for the matrices within the layers, `"other"` for all else: embedding, head, vectors.
        moved: whether an optimizer moves each parameter; not those with a rule of their own, biases of routers.
    """

    matrices: Any
    kinds: Any
    moved: Any


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Returns a linear warm-up, then the schedule that the configuration names; those that fall end at a tenth."""
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


def optimizer_of(config: TrainConfig, model: nnx.Module) -> optax.GradientTransformation:
    """Returns the optimizer that the configuration names, and that averages weights if it says so. Weight decay leaves
    out what is not a matrix."""
    parts = _parts(model)
    optimizer = _MAKERS[config.optimizer](learning_rate(config), config.weight_decay, parts)
    return optimizer if config.average is None else averaged(optimizer, config.average, parts.moved)


def _parts(model: nnx.Module) -> _Parts:
    # Matrices are what is gathered, and adapters; norm scales, also those of a stack of layers, biases and routers are
    # not.
    model_def = split_model(model)[0]
    layouts, rules = model_def.layouts, model_def.update_rules
    adapters = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    is_leaf = lambda x: not isinstance(x, dict)  # noqa: E731
    listed = with_paths(layouts, is_leaf=is_leaf)
    kinds = [
        "other" if layout is None or any(matches(pattern, path) for pattern in EXCLUDED) else "hidden"
        for path, layout in listed
    ]
    structure = jax.tree.structure(layouts, is_leaf=is_leaf)
    return _Parts(
        jax.tree.unflatten(structure, [layout is not None or path in adapters for path, layout in listed]),
        jax.tree.unflatten(structure, kinds),
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
    """Matrices of each layer by Muon, with updates as large as AdamW's; embedding, head and vectors by AdamW."""

    def dimensions(params: Any) -> Any:  # of features in and out; those before them count experts
        return jax.tree.map(lambda p: optax.contrib.MuonDimensionNumbers(p.ndim - 2, p.ndim - 1), params)

    hidden = optax.contrib.muon(
        rate, weight_decay=decay, muon_weight_dimension_numbers=dimensions, consistent_rms=_RMS_OF_ADAM
    )
    return optax.partition({"hidden": per_layer(hidden), "other": _adamw(rate, decay, parts)}, parts.kinds)


def _schedule_free(rate: optax.Schedule, decay: float, parts: _Parts) -> optax.GradientTransformation:
    """Optax's `schedule_free_adamw`, whose weight decay would take all parameters."""
    free = optax.contrib.schedule_free(
        optax.chain(
            optax.scale_by_rms(decay=_B2, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(decay, parts.matrices),
            optax.scale_by_learning_rate(rate),
        ),
        rate,
        b1=_B1,
    )
    # Parameters with a rule of their own are moved behind its back, and would be averaged with what they were at first.
    return optax.partition({True: free, False: optax.set_to_zero()}, parts.moved)


_MAKERS: Mapping[str, Callable[[optax.Schedule, float, _Parts], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
    "schedule-free": _schedule_free,
}
