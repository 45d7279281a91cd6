"""Training steps with `nnx.Optimizer` under `nnx.jit`, with and without a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp

PLAIN = optax.sgd(0.1)  # whose programs are small
MESHES = {"gtp 8": dict(gtp=8), "dp 2, gtp 4": dict(dp=2, gtp=4)}


def scope(degrees: dict[str, int] | None) -> Any:
    return contextlib.nullcontext() if degrees is None else jax.set_mesh(gtp.make_mesh(**degrees))


def put_back(model: nnx.Module, optimizer: nnx.Optimizer, places: Any) -> None:
    """Moves variables to where they were before a step."""
    nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), places))


def places_of(model: nnx.Module, optimizer: nnx.Optimizer) -> Any:
    """Returns where variables are, or are to be: those that `gtp.shard` did not place on every device."""
    everywhere = NamedSharding(jax.sharding.get_mesh(), P())
    place = lambda a: a.sharding if isinstance(a.sharding, NamedSharding) else everywhere  # noqa: E731
    return jax.tree.map(place, nnx.state((model, optimizer)))


def train(
    model: nnx.Module,
    loss: Callable[..., jax.Array],
    batch: Any,
    steps: int = 3,
    optimizer: Any = None,
    stay: bool = True,
) -> dict[str, np.ndarray]:
    """Returns losses, gradients of the first step and of the last, and all variables after it, by name.

    Args:
        stay: whether variables are put back after each step, so that one program serves all of them. Otherwise they
            are left where the compiler put them, and the second step is compiled anew.
    """
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3) if optimizer is None else optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        value, gradients = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, gradients)
        return value, gradients

    stay = stay and not jax.sharding.get_mesh().empty
    places = places_of(model, optimizer) if stay else None
    done = []
    for _ in range(steps):
        if stay:
            put_back(model, optimizer, places)
        done.append(step(model, optimizer, batch))
    found = {"first loss": np.asarray(done[0][0]), "losses": np.asarray([float(value) for value, _ in done])}
    parts = (("first gradient", done[0][1]), ("gradient", done[-1][1]))
    for title, state in (*parts, ("variable", nnx.state(model)), ("optimizer", nnx.state(optimizer))):
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            array = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            found[f"{title} {jax.tree_util.keystr(path)}"] = np.asarray(array)
    return found


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float = 1e-12) -> None:
    """Compares every array, relative to its largest magnitude; after several steps, which make differences larger, to
    a thousand times the tolerance."""
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        allowed = tolerance if name.startswith("first") else 1000 * tolerance
        bound = allowed * max(float(np.abs(array.astype(np.float64)).max(initial=0)), 1e-6)
        np.testing.assert_allclose(found[name], array, rtol=0, atol=bound, err_msg=name)


def twins(make: Callable[[], nnx.Module]) -> tuple[nnx.Module, nnx.Module]:
    """Returns two models of the same arrays, which one program draws."""
    model = nnx.jit(make)()
    return model, nnx.clone(model)


def together(
    make: Callable[[], nnx.Module],
    loss: Any,
    batch: Any,
    degrees: dict[str, int],
    *,
    steps: int = 3,
    stay: bool = True,
    optimizer: Any = PLAIN,
    **options: Any,
):
    """Returns what `train` finds of a model that is sharded over a mesh, and of the same model without a mesh."""
    plain, other = twins(make)
    wanted = train(plain, loss, batch, steps, optimizer)
    with scope(degrees):
        found = train(gtp.shard(other, min_size=64, **options), loss, batch, steps, optimizer, stay)
    return found, wanted
