"""What the system refuses is one message without its number; a reader that has gone is none at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gtp_jax
from gtp_jax.runner.cli._errors import explanation


def test_an_error_of_the_system_names_the_file_and_no_number(tmp_path):
    with pytest.raises(OSError) as error:
        (tmp_path / "nothing").read_text()
    assert explanation(error.value) == f"{tmp_path / 'nothing'}: No such file or directory"


def test_a_pipe_that_nobody_reads_ends_a_command_in_silence():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "gtp_jax", "bench", "suite", "--list"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(gtp_jax.__file__).parents[1])},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
