"""Commands that need no device work, and are silent, where jax's plugin for GPUs is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import gtp_jax
from gtp_jax.checkpoint import Checkpoints


@pytest.mark.parametrize("platforms", [{}, {"JAX_PLATFORMS": "cpu"}], ids=["as it is", "JAX_PLATFORMS=cpu"])
def test_checkpoints_are_listed_without_a_word_of_the_plugin(tmp_path, platforms):
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(7, {"w": jnp.ones(2)}, {})
    plugin = tmp_path / "site/jax_plugins/broken"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(f"def initialize():\n    open({str(tmp_path / 'tried')!r}, 'w')\n    1 / 0")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"} | platforms
    environment["PYTHONPATH"] = f"{Path(gtp_jax.__file__).parents[1]}:{tmp_path / 'site'}"
    words = [sys.executable, "-m", "gtp_jax", "checkpoint", "list", str(tmp_path / "run")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "   7" in done.stdout
    assert (tmp_path / "tried").exists()  # so that there was something to say
