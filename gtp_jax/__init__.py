"""Generalized Tensor Parallelism for JAX: weights are sharded and gathered just in time."""

from . import _names_above

# see [Note: names above]: importing a package of this one, such as the command line, imports no other
ABOVE = {"gtp_jax.inspect": ("explain",)}
__getattr__ = _names_above.look_up(__name__, ABOVE, names=f"{__name__}._public")


def __dir__() -> list[str]:
    return sorted({*globals(), *_names_above.load(__name__, f"{__name__}._public"), *sum(ABOVE.values(), ())})


__version__ = "0.2.0"
