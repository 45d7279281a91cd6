"""Makes names of higher packages available in lower ones.

[Note: names above] Imports go downward: a package imports only packages below it. But users write `gtp_jax.nn.MoE`,
and `MoE` is defined in `experts`, above `nn`. `nn` itself never uses such a name. The name is looked up in its own
module only when a user asks for it, so that importing `nn` imports nothing above it. Type checkers read the imports
under `TYPE_CHECKING`; the import contract lists each of them as an exception.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def look_up(package: str, rooms: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__`, which finds names of higher packages.

    Args:
        package: the name of the package, such as `gtp_jax.nn`.
        rooms: the names that each higher package provides, by the name of that package.
    """
    room_of = {name: room for room, names in rooms.items() for name in names}

    def find(name: str) -> Any:
        if name not in room_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(room_of[name]), name)

    return find
