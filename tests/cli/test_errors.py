"""What the system, a device or the package complains of is one message, without what only developers understand."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming

from gtp_jax.runner import cli
from gtp_jax.runner._exit_codes import MISTAKE, of_error
from gtp_jax.runner.cli._errors import explanation
from gtp_jax.runner.cli._warnings import plain_warnings

OURS = str(cli.__file__)


def test_an_error_of_the_system_names_the_file_and_no_number(tmp_path):
    with pytest.raises(OSError) as error:
        (tmp_path / "nothing").read_text()
    assert explanation(error.value) == f"{tmp_path / 'nothing'}: No such file or directory"


def test_too_little_memory_of_a_device_or_of_the_host_is_said_in_words():
    with pytest.raises(jax.errors.JaxRuntimeError) as device:
        jnp.zeros(1 << 46).block_until_ready()
    with pytest.raises(MemoryError) as host:
        np.ones(1 << 46)
    for error in (device.value, host.value):
        text = explanation(error)
        assert text.startswith("out of memory: ") and "allocat" in text and "RESOURCE_EXHAUSTED" not in text
        assert re.search(naming("--preset --seq --batch --microbatches devices"), text)
    assert of_error(device.value) == MISTAKE
    # a defect: its traceback is shown
    assert explanation(jax.errors.JaxRuntimeError("INTERNAL: another error")) is None


def said(filename: str, text: str = "10 are cut") -> str:
    return warnings.formatwarning(UserWarning(text), UserWarning, filename, 3, "corpus = read()")


def test_a_warning_of_the_package_is_one_line_with_the_command_and_no_control_characters():
    with plain_warnings("train"):
        assert said(OURS) == "gtp-jax train: warning: 10 are cut\n"
        assert said(OURS, "a\x1b[31m.npy is short") == "gtp-jax train: warning: a\\x1b[31m.npy is short\n"
