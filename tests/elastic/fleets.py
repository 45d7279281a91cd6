"""Starts `gtp-jax train --elastic` on virtual CPU devices, does harm to it, and reads what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from trainer.runs import logged, read_records, small, write_text

import gtp_jax

ROOT = Path(gtp_jax.__file__).parents[1]
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
TIMEOUT_S = 420

# Python imports a module of this name by itself, so that every process of a run can be harmed from inside: SIGUSR2
# raises an exception in it, or ends it amid its next snapshot if AMID_SNAPSHOT is set; and the probe of a device that
# DEVICE_BROKEN names fails.
_HARM = """
import os, signal, sys

def raise_here(*_):
    if "AMID_SNAPSHOT" not in os.environ:
        raise RuntimeError("an exception from outside")
    from gtp_jax.checkpoint import _checkpoints
    _checkpoints.Digests.result = lambda _: os._exit(9)  # when all is written but the manifest

if "elastic._worker" in " ".join(sys.orig_argv):
    signal.signal(signal.SIGUSR2, raise_here)
if "JAX finds no GPU" in " ".join(sys.orig_argv) and sys.orig_argv[-1] == os.environ.get("DEVICE_BROKEN"):
    print("this device is broken", flush=True)
    os._exit(1)
"""

__all__ = [
    "ROOT",
    "elastic",
    "environment",
    "events",
    "finish",
    "flags",
    "logged",
    "read_records",
    "wait",
    "write_text",
]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """What a run has in its environment."""
    harm = folder / "harm"
    harm.mkdir(parents=True, exist_ok=True)
    (harm / "sitecustomize.py").write_text(_HARM)
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": QUICK_COMPILE,
        "PYTHONPATH": os.pathsep.join([str(harm), str(ROOT)]),
        **more,
    }


def flags(text: Path, out: Path, **changes: Any) -> list[str]:
    """Flags of a run in float64, which is equal on all meshes to 1e-12. It has the four layers of "tiny": the steps of
    two layers are over before their snapshots."""
    return small(text, out, **{"dtype": "float64", "num_layers": None, **changes})


@contextmanager
def train(arguments: list[str], folder: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A run, whose output goes to `folder/output.txt`."""
    command = [sys.executable, "-m", "gtp_jax", "train", *arguments]
    surroundings = environment(folder, **more)
    with (folder / "output.txt").open("w") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=surroundings)
    try:
        yield run
    finally:
        run.kill()  # which ends its processes, too
        run.wait()


def elastic(arguments: list[str], folder: Path, **more: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A run under a supervisor."""
    return train(["--elastic", *arguments], folder, **more)


def finish(run: subprocess.Popen[str], folder: Path) -> str:
    """Waits for a run that must succeed and returns its output."""
    try:
        status = run.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        status = None
    output = (folder / "output.txt").read_text()
    assert status == 0, (status, output[-4000:])
    return output


def wait(condition: Callable[[], Any], run: subprocess.Popen[str], seconds: float = TIMEOUT_S) -> Any:
    """Waits for something that a run does, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert run.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return found


def events(out: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The events of a run's supervisor, or those of one name; its processes write to the same file."""
    path = out / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if "process" not in event and name in (None, event["event"])]
