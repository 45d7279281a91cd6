"""Memory that is too small is said in words, with what to do about it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gtp_jax.runner._exit_codes import MISTAKE, of_error
from gtp_jax.runner.cli._errors import explanation
from gtp_jax.runner.trainer import _run


def test_too_little_memory_of_a_device_or_of_the_host_is_said_in_words():
    with pytest.raises(jax.errors.JaxRuntimeError) as device:
        jnp.zeros(1 << 46).block_until_ready()
    with pytest.raises(MemoryError) as host:
        np.ones(1 << 46)
    for error in (device.value, host.value):
        text = explanation(error)
        assert text.startswith("out of memory: ") and "allocat" in text and "RESOURCE_EXHAUSTED" not in text
        assert "Use a smaller --preset, --seq or --batch, more --microbatches or more devices" in text
    assert "a device is out of memory (RESOURCE_EXHAUSTED: " in _run._reason(device.value)
    assert "Use a smaller --batch, more --microbatches, or a higher --gtp" in _run._reason(device.value)
    assert of_error(device.value) == MISTAKE
    assert (
        explanation(jax.errors.JaxRuntimeError("INTERNAL: another error")) is None
    )  # a defect: its traceback is shown
