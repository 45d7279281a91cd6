"""A probe finds out whether a device computes; a hung or broken one fails within its time."""

from __future__ import annotations

import time

import pytest

from gtp_jax.elastic._devices import Device
from gtp_jax.elastic._probe import Probe, probe

_HARM = """
import sys, time
if "JAX finds no GPU" in " ".join(sys.orig_argv) and sys.orig_argv[-1] == "1":
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_sound_device_computes_a_hung_one_and_a_missing_gpu_are_found(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(_HARM)
    monkeypatch.syspath_prepend(str(tmp_path))
    cpu = {"JAX_PLATFORMS": "cpu"}
    devices = [
        Device(0, "sound", cpu),
        Device(1, "hung", cpu),
        Device(2, "missing", {**cpu, "CUDA_VISIBLE_DEVICES": "7"}),
    ]
    begin = time.monotonic()
    sound, hung, missing = probe(devices, 15)
    assert time.monotonic() - begin < 60
    assert (sound.device.name, sound.trouble) == ("sound", "")
    assert hung.trouble == "it has not computed within 15 s"
    assert missing.trouble == "JAX finds no GPU"


def test_a_probe_in_the_background_says_nothing_until_it_knows():
    asked = Probe(Device(0, "sound", {"JAX_PLATFORMS": "cpu"}), 60)
    assert asked.result() is None
    deadline = time.monotonic() + 60
    while (finding := asked.result()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert finding.trouble == "" and finding.seconds > 0


def test_a_cancelled_probe_is_ended():
    asked = Probe(Device(0, "sound", {"JAX_PLATFORMS": "cpu"}), 60)
    asked.cancel()
    assert asked._child.returncode is not None
