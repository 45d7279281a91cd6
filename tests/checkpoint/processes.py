"""Processes that run a program together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start(code: str, count: int, *arguments: str, **environment: str) -> list[subprocess.Popen]:
    """Starts `count` processes, each of which is given an address, its number, and the arguments."""
    address, environment = free_address(), os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    pipe = subprocess.PIPE
    commands = [[sys.executable, "-c", code, address, str(rank), *arguments] for rank in range(count)]
    return [subprocess.Popen(one, env=environment, stdout=pipe, stderr=pipe, text=True) for one in commands]


def printed_by(processes: list[subprocess.Popen]) -> list[str]:
    """Returns what each has printed when all have ended."""
    outputs = [process.communicate(timeout=400) for process in processes]
    for process, (_, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [out for out, _ in outputs]
