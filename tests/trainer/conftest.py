"""Words that most runs are trained on."""

from pathlib import Path

import jax
import pytest
from trainer.runs import write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A folder of words to learn; tests leave it as it is."""
    jax.devices()  # started here with its 8 devices, which no run may change
    return write_text(tmp_path_factory.mktemp("text"))
