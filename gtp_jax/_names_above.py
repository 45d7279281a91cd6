"""Makes names of higher packages available in lower ones, and those of `gtp_jax` on first use.

[Note: names above] Imports go downward: a package imports only packages below it. But users write `gtp_jax.nn.MoE`,
and `MoE` is defined in `experts`, above `nn`. `nn` itself never uses such a name. The name is looked up in its own
module only when a user asks for it, so that importing `nn` imports nothing above it. For type checkers the names are in
a stub, `__init__.pyi` beside `__init__.py`, which they read in its place. Python and the import contracts do not read
it.

`gtp_jax` itself is above everything that it names, and Python imports it before any package in it. It looks up all
its names in this way, so that `gtp-jax --help` imports no JAX.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Rooms = Mapping[str, tuple[str, ...]]


def look_up(package: str, rooms: Rooms, old: Rooms | None = None) -> Callable[[str], Any]:
    """Returns a package's `__getattr__`, which finds names of higher packages.

    Args:
        package: the name of the package, such as `gtp_jax.nn`.
        rooms: the names that each higher package provides, by the name of that package.
        old: the same for names that the package no longer has: the first use of each causes a DeprecationWarning. A
            package with `old` has no names besides these and its modules, and `__all__` lists those of `rooms`.
    """
    room_of = {name: room for room, names in rooms.items() for name in names}
    old_room_of = {name: room for room, names in (old or {}).items() for name in names}

    def find(name: str) -> Any:
        if name in room_of:
            return getattr(_imported(room_of[name]), name)
        if name in old_room_of:
            new = f"{old_room_of[name]}.{name}"
            warnings.warn(f"`{package}.{name}` is deprecated: use {new}", DeprecationWarning, stacklevel=2)
            found = getattr(_imported(old_room_of[name]), name)
            setattr(sys.modules[package], name, found)  # `from gtp_jax import X` looks it up twice
            return found
        if old is not None and name == "__all__":  # for `from gtp_jax import *`
            return sorted(room_of)
        if old is not None and not name.startswith("__") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return _imported(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def rooms_of_stub(package: str) -> Rooms:
    """Returns the modules of a package that its stub, `__init__.pyi`, imports names from, for `look_up`.

    Such a package imports a module when one of its names is used.
    """
    stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi").read_text()
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    rooms: dict[str, tuple[str, ...]] = {}
    for node in imports:
        room = f"{package}.{node.module}"
        rooms[room] = (*rooms.get(room, ()), *(alias.name for alias in node.names))
    return rooms


def _imported(module: str) -> Any:
    """Imports a module.

    Raises:
        ImportError: if it cannot be imported. Python would take an AttributeError, which another version of JAX may
            cause, for the absence of the name that was looked up, and would hide it.
    """
    try:
        return importlib.import_module(module)
    except AttributeError as error:
        raise ImportError(f"{module} cannot be imported: {error}") from error
