"""Lets the processes of a program read each other's reports, while none of their collectives ends."""

from __future__ import annotations

import abc
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax._src import distributed  # noqa: TID251  JAX has no public name for the key-value store of its coordinator

Values = Mapping[str, Any]


class Meeting(abc.ABC):
    """A place for one report of each process, and for a question to all of them."""

    @abc.abstractmethod
    def put(self, name: str, values: Values) -> None:
        """Replaces a report. `values` is JSON."""

    @abc.abstractmethod
    def get(self, name: str) -> Values | None:
        """Returns a report, or `None` if there is none."""


class InFolder(Meeting):
    """A folder that all processes share.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, values: Values) -> None:
        """Replaces a report; see `Meeting`."""
        new = self._folder / f".{name}.{os.getpid()}"
        new.write_text(json.dumps(values))
        new.replace(self._folder / f"{name}.json")

    def get(self, name: str) -> Values | None:
        """Returns a report; see `Meeting`."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self._folder / f"{name}.json").read_text())
        return None


class AtCoordinator(Meeting):
    """The key-value store of JAX's coordinator, which all processes of `jax.distributed` can reach.

    Args:
        prefix: what the keys begin with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def put(self, name: str, values: Values) -> None:
        """Replaces a report; see `Meeting`."""
        _client().key_value_set(f"{self._prefix}/{name}", json.dumps(values), allow_overwrite=True)

    def get(self, name: str) -> Values | None:
        """Returns a report; see `Meeting`."""
        try:
            return json.loads(_client().key_value_try_get(f"{self._prefix}/{name}"))
        except Exception as error:  # jaxlib raises the same class for every status
            if "NOT_FOUND" in str(error):
                return None
            raise


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ConnectionError("JAX's processes are no longer connected")
    return client
