"""Makes names of higher packages available in lower ones, and those of `gtp_jax` on first use.

[Note: names above] Imports go downward: a package imports only packages below it. But users write `gtp_jax.nn.MoE`,
and `MoE` is defined in `experts`, above `nn`. `nn` itself never uses such a name. The name is looked up in its own
module only when a user asks for it, so that importing `nn` imports nothing above it. For type checkers the names are in
a stub, `__init__.pyi` beside `__init__.py`, which they read in its place. Python and the import contracts do not read
it.

`gtp_jax` itself stands above everything that it names, and Python imports it before any package in it. It imports
`_public` with the first of these names, so that `gtp-jax --help` imports no JAX.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def look_up(package: str, rooms: Mapping[str, tuple[str, ...]], names: str = "") -> Callable[[str], Any]:
    """Returns a package's `__getattr__`, which finds names of higher packages.

    Args:
        package: the name of the package, such as `gtp_jax.nn`.
        rooms: the names that each higher package provides, by the name of that package.
        names: the module with the package's own names, imported with the first of them; by default, there is none.
    """
    room_of = {name: room for room, names in rooms.items() for name in names}

    def find(name: str) -> Any:
        if name in room_of:
            return getattr(_imported(room_of[name]), name)
        if names and name == "__all__":  # for `from gtp_jax import *`
            return sorted({*load(package, names), *room_of})
        if names and not name.startswith("__"):
            # first, because `from .. import native` in a package that is being imported must import nothing else
            if importlib.util.find_spec(f"{package}.{name}") is not None:
                return _imported(f"{package}.{name}")
            if name in load(package, names):
                return getattr(sys.modules[package], name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def load(package: str, names: str) -> Collection[str]:
    """Gives a package the names of a module, as if it had imported them, and returns them.

    A name that the package already has, such as one that a test has replaced, stays as it is.
    """
    found = {name: value for name, value in vars(_imported(names)).items() if not name.startswith("_")}
    own = vars(sys.modules[package])
    own.update({name: value for name, value in found.items() if name not in own})
    return found.keys()


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
