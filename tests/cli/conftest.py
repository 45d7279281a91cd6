"""A run that the commands are tried on."""

from pathlib import Path

import jax
import pytest
from trainer.runs import small, write_text

from gtp_jax.runner.cli import main


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A run of four steps, with checkpoints of steps 2 and 4; tests leave it as it is."""
    jax.devices()  # started here with its 8 devices, which no run may change
    folder = tmp_path_factory.mktemp("command")
    assert main(["train", *small(write_text(folder / "text"), folder / "run", steps=4)]) == 0
    return folder / "run"
