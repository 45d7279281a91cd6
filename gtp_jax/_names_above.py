"""Names of higher rooms, under which users know them in a lower one.

[Note: names above] Imports go downward: what a room runs with lies below it. But users write `gtp_jax.nn.MoE`, and
`MoE` lies in `experts`, above `nn`. Such a name is an address, and `nn` never reads it: it is looked up in the module
that has it when somebody asks for it, so that importing `nn` imports nothing above it. Type checkers read the imports
under `TYPE_CHECKING`, which the import contract names one by one as its exceptions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def look_up(package: str, rooms: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Returns a package's `__getattr__`, which finds names of other rooms.

    Args:
        package: its name, such as `gtp_jax.nn`.
        rooms: names, by the module that has them.
    """
    room_of = {name: room for room, names in rooms.items() for name in names}

    def find(name: str) -> Any:
        if name not in room_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(room_of[name]), name)

    return find
