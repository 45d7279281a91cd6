"""Generalized Tensor Parallelism for JAX: weights are sharded and gathered just in time."""

from . import _names_above, _old_names

# see [Note: names above]: importing a package of this one, such as the command line, imports no other
ABOVE = {
    "gtp_jax.checkpoint": ("Checkpoints",),
    "gtp_jax.flight_recorder": ("recorder",),
    "gtp_jax.hook": ("shard",),
    "gtp_jax.inspect": ("explain",),
    "gtp_jax.mesh": ("make_mesh",),
    "gtp_jax.nn": ("MLP", "Attention", "Dense", "Embed", "Param", "Stack", "cross_entropy", "init"),
    "gtp_jax.recipes": ("FP8", "MXFP8", "NVFP4", "use_recipe"),
    "gtp_jax.runner.launch": ("distributed",),
    "gtp_jax.runner.trainer": ("Trainer",),
    "gtp_jax.train": ("TrainState", "eval_step", "train_step"),
}
# the packages for users; the others can be imported too, but `dir` does not show them
PACKAGES = (
    *("checkpoint", "collectives", "convert", "formats", "generation", "hlo", "hook", "inspect", "layout", "mesh"),
    *("models", "nn", "nonuniform", "ops", "optimizers", "recipes", "train", "weights"),
)
__getattr__ = _names_above.look_up(__name__, ABOVE, _old_names.OLD_NAMES)


def __dir__() -> list[str]:
    return sorted({*__getattr__("__all__"), *PACKAGES, *(name for name in globals() if name.startswith("__"))})


__version__ = "0.2.0"
