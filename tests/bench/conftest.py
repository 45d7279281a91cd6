"""Starts JAX with the 8 devices of the suite, which no command that is tried here may change."""

import importlib
import sys
from pathlib import Path

import jax
import pytest

import benchmarks

jax.devices()
SCRIPTS = Path(benchmarks.__file__).with_name("contenders")


@pytest.fixture
def script(monkeypatch):
    """Imports a contender's script as if from its own folder."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in (set(sys.modules) - before) & {path.stem for path in SCRIPTS.glob("*.py")}:
        sys.modules.pop(name)


@pytest.fixture
def partitioner(script):
    return script("partitioner")
