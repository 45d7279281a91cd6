"""Turns modules into units and holders: creates subclasses of their classes whose methods call the hook."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from ..chain import Remat, Schedule
from ..mesh import Roles, current_view, refuse_parts_of_sequences
from ._call import Placements, call_holder, call_unit


@dataclasses.dataclass(frozen=True)
class Unit:
    """The kind of a module that gathers its weights when it is called.

    Attributes:
        remat: the policy for what is saved for backward.
        schedule: how its calls are ordered among those of a walk.
        methods: the names of the methods whose calls gather the weights; the module may lack some of them.
        roles: the roles of the mesh axes.
        wide: whether the model was sharded with `grad_reduce="float32"`.
        block: whether the module is a block. If not, it is a module with weights outside of blocks.
        min_size: the argument `min_size` with which the model was sharded.
        specs: the argument `specs` with which the model was sharded, as pairs of a pattern and a partition.
        placements: its weights, with their placements.
    """

    remat: Remat
    schedule: Schedule
    methods: tuple[str, ...]
    roles: Roles
    wide: bool
    block: bool
    min_size: int
    specs: tuple[tuple[str, PartitionSpec | None], ...]
    placements: Placements


@dataclasses.dataclass(frozen=True)
class Holder:
    """The kind of a module that contains units. Unless the hook is off (`hook_is_off`), a call of one of the methods
    that `methods_of` finds in its class begins a walk, or joins the walk that is under way in the same trace.

    Attributes:
        roles: the roles of the mesh axes.
        placements: the weights that it holds itself, with their placements.
    """

    roles: Roles
    placements: Placements


Kind = Unit | Holder


def kind_of(module: Any) -> Kind | None:
    """Returns the kind that `shard` gave a module; `None` if the module is neither a unit nor a holder."""
    return getattr(type(module), "_gtp_kind", None)


def make(module: nnx.Module, kind: Kind) -> None:
    """Makes a module a unit or a holder, by changing its class to a subclass of that class; of one that is a unit or
    holder already, changes the kind."""
    object.__setattr__(module, "__class__", _hooked(getattr(type(module), "_gtp_class", type(module)), kind))


@contextlib.contextmanager
def unmade(modules: Iterable[nnx.Module]) -> Iterator[None]:
    """Returns a context in which the units and holders among `modules` have the classes that they had before `make`."""
    made = [(module, type(module)) for module in modules if kind_of(module) is not None]
    for module, cls in made:
        object.__setattr__(module, "__class__", cls._gtp_class)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for module, cls in made:
            object.__setattr__(module, "__class__", cls)


def methods_of(cls: type, names: Iterable[str] | None = None) -> dict[str, Callable[..., Any]]:
    """Returns, by name, a class's public methods and `__call__`, except those that it inherits from `nnx.Module`.
    Generator functions, properties, and static and class methods are left out. If `names` is given, only methods with
    these names are returned."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        if base in nnx.Module.__mro__:
            continue
        for name, member in vars(base).items():
            public = not name.startswith("_") or name == "__call__"
            if public and _is_method(member) and (names is None or name in names):
                found[name] = member
            elif name in found:
                del found[name]
    return found


def _is_method(member: Any) -> bool:
    """Returns whether a member of a class is a function, or what a decorator such as `nnx.jit` makes of one."""
    if isinstance(member, staticmethod | classmethod | type) or inspect.isgeneratorfunction(member):
        return False
    return callable(member) and hasattr(type(member), "__get__")


def call_with_weights(function: Callable[..., Any], module: nnx.Module, *args: Any) -> Any:
    """Returns `function(module, *args)`, as a call of one of the module's own methods: if the module is a unit, its
    weights are gathered for the call.

    Args:
        function: the function. It may close over no array.
        module: any module.
        args: its further arguments.
    """
    kind = kind_of(module)
    return _hook(function, kind)(module, *args) if isinstance(kind, Unit) else function(module, *args)


class _Hooked(type(nnx.Module)):
    """The metaclass of the subclasses that `make` creates. `pickle` stores such a subclass as the original class and
    the kind."""


@functools.cache
def _hooked(cls: type, kind: Kind) -> type:
    names = kind.methods if isinstance(kind, Unit) else None
    members = {name: _hook(method, kind) for name, method in methods_of(cls, names).items()}
    members |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    members |= {"_gtp_kind": kind, "_gtp_class": cls}
    # `nnx.capture`, for example, looks for methods in the class itself, not in its bases.
    own = {k: v for k, v in vars(cls).items() if inspect.isfunction(v) and not k.startswith("_")}
    options = {"pytree": cls._pytree__is_pytree} if hasattr(cls, "_pytree__is_pytree") else {}
    return _Hooked(cls.__name__, (cls,), {**own, **members}, **options)


def _hook(method: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_view() == "local":
            called = f"{type(self).__name__}, which `gtp_jax.shard` sharded, is called"
            refuse_parts_of_sequences(kind.roles, called, "Use `view='global'`.")
        if isinstance(kind, Unit):
            roles = kind.roles
            options: Any = {"remat": kind.remat, "schedule": kind.schedule, "wide": kind.wide}
            options |= {"batch": roles.batch, "sequence": () if roles.sequence is None else (roles.sequence,)}
            return call_unit(method, self, args, kwargs, kind.placements, **options)
        return call_holder(method, self, args, kwargs, kind.placements, batch=kind.roles.batch)

    return call


copyreg.pickle(_Hooked, lambda cls: (_hooked, (cls._gtp_class, cls._gtp_kind)))  # pyright: ignore
