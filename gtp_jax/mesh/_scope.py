"""The mesh in scope, checked where a model is made and where its layers are called."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax.interpreters import pxla
from jax.sharding import AxisType, Mesh


def _legacy_scope() -> Any:
    """Returns where `with mesh:` puts its mesh: nothing else of JAX says what that is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(pxla, "thread_resources", None)


_legacy = _legacy_scope()


def check_mesh_in_scope(*, creates: bool = False) -> None:
    """Refuses meshes that gtp_jax cannot see, or on which it cannot leave the sharding between its layers to XLA.

    Args:
        creates: whether arrays are made here. Without a mesh they will be on one device; if there are several, that is
            worth a warning.

    Raises:
        ValueError: if the mesh in scope has Explicit axes, or was put there by `with mesh:`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = [axis for axis, kind in kinds if kind == AxisType.Explicit]
        if explicit:
            raise ValueError(
                f"the mesh in scope has the Explicit axes {', '.join(map(repr, explicit))}, the default of "
                "`jax.make_mesh`: there types say how every array is sharded, which gtp_jax leaves to XLA between its "
                "layers. Make the mesh with `gtp_jax.make_mesh(dp=..., gtp=..., tp=...)`, or with "
                f"`jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)})`, and put it "
                "in scope with `jax.set_mesh(mesh)`."
            )
        return
    if (legacy := legacy_mesh()) is not None:
        raise ValueError(
            f"a mesh is in scope by `with mesh:`, with the axes {legacy.axis_names}. JAX has "
            "deprecated that, and arrays made under it would be on one device. Take `with jax.set_mesh(mesh):`, with a "
            "mesh of `gtp_jax.make_mesh(dp=..., gtp=..., tp=...)`."
        )
    if creates and jax.device_count() > 1:
        warnings.warn(
            f"no mesh is in scope, and there are {jax.device_count()} devices: the model will be whole, on one of "
            "them. To shard it, build and call it under `with jax.set_mesh(gtp_jax.make_mesh(gtp=...)):`.",
            stacklevel=3,
        )


def legacy_mesh() -> Mesh | None:
    """Returns the mesh that is in scope by `with mesh:`, if any."""
    mesh = None if _legacy is None else _legacy.env.physical_mesh
    return None if mesh is None or mesh.empty else mesh


@contextlib.contextmanager
def legacy_mesh_in_scope() -> Iterator[None]:
    """Puts a mesh that is in scope by `with mesh:` in scope as `jax.set_mesh` does; otherwise it changes nothing. It is
    also a decorator."""
    with contextlib.ExitStack() as stack:
        mesh = legacy_mesh()
        if mesh is not None and jax.sharding.get_abstract_mesh().empty:
            try:
                stack.enter_context(jax.set_mesh(mesh))
            except ValueError:  # in a trace, whose devices are those of its inputs
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        yield


def mesh_of_devices(caller: str) -> Mesh:
    """Returns the mesh in scope with its devices, for arrays that are put there; an empty one if there is none.

    Args:
        caller: what messages call the function that puts them.

    Raises:
        ValueError: within a program that is traced, which has no devices yet.
    """
    try:
        return jax.sharding.get_mesh()
    except ValueError as error:
        raise ValueError(
            f"`{caller}` is called while JAX traces a program (`jax.jit`, `jax.eval_shape`), in which no array "
            "can be put on the devices of the mesh. Call it outside: it compiles by itself what it computes, and "
            "`gtp_jax.nn.abstract_model` gives shapes and shardings without computing."
        ) from error
