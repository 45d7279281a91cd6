"""The optimizer of a training run, and its learning rate."""

from __future__ import annotations

import jax
import optax
from flax import nnx

from ...nn import split_model
from ._train_flags import TrainConfig


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Returns a linear warm-up, then a cosine down to a tenth at the last step."""
    peak, warmup = config.peak_lr, config.warmup_steps
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup + 1), peak, warmup, max(config.steps, warmup + 1), end_value=peak / 10
    )


def adamw(config: TrainConfig, model: nnx.Module) -> optax.GradientTransformation:
    """Returns AdamW whose weight decay leaves out what is not a matrix."""
    # Matrices are what is gathered; norm scales, also those of a stack of layers, biases and routers are not.
    layouts = split_model(model)[0].layouts
    matrices = jax.tree.map(lambda layout: layout is not None, layouts, is_leaf=lambda x: not isinstance(x, dict))
    return optax.adamw(learning_rate(config), b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=matrices)
