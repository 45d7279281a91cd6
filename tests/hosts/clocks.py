"""Wall clocks that differ from this machine's, as the library `clock.c` shows them to processes."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """A wall clock, right at first. Skips the test where there is no C compiler.

    Args:
        file: where to keep how far it is ahead; the library lies next to it.

    Attributes:
        environment: the variables by which a process sees this clock.
    """

    def __init__(self, file: Path) -> None:
        if (compiler := shutil.which("cc")) is None:
            pytest.skip("needs a C compiler")
        self._file, library = file, file.with_name("clock.so")
        if not library.exists():
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
        file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "HOST_CLOCK": str(file)}

    def set(self, ahead: int) -> None:
        """Sets the clock to this many seconds ahead, also for processes that run."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", ahead))
