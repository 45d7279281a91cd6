"""Commands that need no device work, and are silent, where jax's plugin for GPUs is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from selection import others_full

import gtp_jax
from gtp_jax.checkpoint import Checkpoints


@pytest.mark.parametrize("platforms", others_full([None, "cpu", "cuda"], ["cuda"]))
def test_checkpoints_are_verified_without_a_word_of_the_plugin(tmp_path, platforms):
    """Also where JAX is asked for a GPU: a machine may say so of all its programs, and have none."""
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(7, {"w": jnp.ones(2)}, {})
    plugin = tmp_path / "site/jax_plugins/broken"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(f"def initialize():\n    open({str(tmp_path / 'tried')!r}, 'w')\n    1 / 0")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment |= {} if platforms is None else {"JAX_PLATFORMS": platforms}
    folders = [Path(gtp_jax.__file__).parents[1], tmp_path / "site", *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    words = [sys.executable, "-m", "gtp_jax", "checkpoint", "verify", str(tmp_path / "run")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "step 7: whole" in done.stdout
    assert (tmp_path / "tried").exists()  # so that there was something to say
