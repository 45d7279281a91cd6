"""The mesh in scope, which is checked when a model is made and when its layers are called."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax.interpreters import pxla
from jax.sharding import AxisType, Mesh


def _legacy_scope() -> Any:
    """Returns the object in which `with mesh:` stores its mesh, because JAX has no public way to read it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(pxla, "thread_resources", None)


_legacy = _legacy_scope()


def check_mesh_in_scope(*, creates: bool = False) -> None:
    """Checks that gtp_jax can use the mesh in scope: that it was put there by `jax.set_mesh`, and has no Explicit axes,
    because gtp_jax leaves the sharding between its layers to XLA.

    Args:
        creates: whether the caller creates arrays. If it does, and there are several devices but no mesh in scope, a
            warning is issued that the arrays will be on one device.

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
                "`jax.make_mesh`. On Explicit axes, the type of an array determines its sharding, but gtp_jax leaves "
                "sharding between its layers to XLA. Make the mesh with "
                "`gtp_jax.make_mesh(dp=..., gtp=..., tp=...)`, or with "
                f"`jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)})`, and put it "
                "in scope with `jax.set_mesh(mesh)`."
            )
        return
    if (legacy := legacy_mesh()) is not None:
        raise ValueError(
            f"a mesh was put in scope by `with mesh:`, with the axes {legacy.axis_names}. JAX has "
            "deprecated that, and arrays made under it would be on one device. Use `with jax.set_mesh(mesh):`, with a "
            "mesh from `gtp_jax.make_mesh(dp=..., gtp=..., tp=...)`."
        )
    if creates and jax.device_count() > 1:
        warnings.warn(
            f"no mesh is in scope, and there are {jax.device_count()} devices: the whole model will be on one of "
            "them. To shard it, build and call it under `with jax.set_mesh(gtp_jax.make_mesh(gtp=...)):`.",
            stacklevel=3,
        )


def legacy_mesh() -> Mesh | None:
    """Returns the mesh that `with mesh:` has put in scope, if any."""
    mesh = None if _legacy is None else _legacy.env.physical_mesh
    return None if mesh is None or mesh.empty else mesh


@contextlib.contextmanager
def legacy_mesh_in_scope() -> Iterator[None]:
    """Puts a mesh of `with mesh:` in scope as `jax.set_mesh` does, unless such a mesh is in scope already. Without a
    mesh of `with mesh:`, it changes nothing. It is also a decorator."""
    with contextlib.ExitStack() as stack:
        mesh = legacy_mesh()
        if mesh is not None and jax.sharding.get_abstract_mesh().empty:
            try:
                stack.enter_context(jax.set_mesh(mesh))
            except ValueError:  # while tracing, when the inputs determine the devices
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        yield


def mesh_of_devices(caller: str) -> Mesh:
    """Returns the mesh in scope with its devices, on which the caller can put arrays; an empty mesh if there is none.

    Args:
        caller: the name of the calling function in error messages.

    Raises:
        ValueError: while JAX traces a program, because it has no devices yet.
    """
    try:
        return jax.sharding.get_mesh()
    except ValueError as error:
        raise ValueError(
            f"`{caller}` is called while JAX traces a program (`jax.jit`, `jax.eval_shape`), in which no array "
            "can be put on the devices of the mesh. Call it outside: it compiles its own computations, and "
            "`gtp_jax.nn.abstract_model` returns shapes and shardings without computing."
        ) from error
