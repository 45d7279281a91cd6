"""Words, and a run that the commands are tried on."""

from pathlib import Path

import jax
import pytest
from trainer.runs import small, write_text

from gtp_jax.runner.cli import main


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder of words to learn; tests leave it as it is."""
    jax.devices()  # started here with its 8 devices, which no run may change
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def run(text, tmp_path_factory) -> Path:
    """A run of four steps, with checkpoints of steps 2 and 4; tests leave it as it is."""
    out = tmp_path_factory.mktemp("command") / "run"
    assert main(["train", *small(text, out, num_layers=1, steps=4)]) == 0
    return out
