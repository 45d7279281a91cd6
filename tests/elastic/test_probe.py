"""A probe finds out whether a device computes; a hung or broken one fails within its time."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gtp_jax.runner.elastic._devices import Device
from gtp_jax.runner.elastic._probe import Finding, Probe, probe

# Device 1 hangs when it is used; the imports of device 3 wait for a file.
_HARM = """
import builtins, os, sys, time
said = builtins.print
def say(*words, **options):
    said(*words, **options)
    time.sleep(600)
if "JAX finds no GPU" in " ".join(sys.orig_argv):
    if sys.orig_argv[-1] == "1":
        builtins.print = say
    while sys.orig_argv[-1] == "3" and not os.path.exists(os.environ["MAY_IMPORT"]):
        time.sleep(0.05)
"""


@pytest.fixture
def harm(tmp_path, monkeypatch) -> Path:
    """Harms probes from inside; returns the file for which device 3 waits."""
    (tmp_path / "sitecustomize.py").write_text(_HARM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MAY_IMPORT", str(tmp_path / "now"))
    return tmp_path / "now"


def until[T](ask: Callable[[], T | None]) -> T:
    """What is not `None`, within a minute."""
    deadline = time.monotonic() + 60
    while (found := ask()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("harm")
def test_a_sound_device_computes_a_hung_one_and_a_missing_gpu_are_found():
    cpu = {"JAX_PLATFORMS": "cpu"}
    devices = [
        Device(0, "sound", cpu),
        Device(1, "hung", cpu),
        Device(2, "missing", {**cpu, "CUDA_VISIBLE_DEVICES": "7"}),
    ]
    begin = time.monotonic()
    sound, hung, missing = probe(devices, 15, lambda: time.sleep(0.1))
    assert time.monotonic() - begin < 60
    assert (sound.device.name, sound.trouble) == ("sound", "")
    assert re.fullmatch(r"it has not computed within \d+ s", hung.trouble)
    assert missing.trouble == "JAX finds no GPU"


def test_a_probe_in_the_background_says_nothing_until_it_knows():
    asked = Probe(Device(0, "sound", {"JAX_PLATFORMS": "cpu"}), 60)
    assert asked.result() is None
    finding = until(asked.result)
    assert finding.trouble == "" and finding.seconds > 0


def test_a_cancelled_probe_is_ended():
    asked = Probe(Device(0, "sound", {"JAX_PLATFORMS": "cpu"}), 60)
    asked.cancel()
    assert asked._child.returncode is not None


@pytest.mark.slow
def test_a_device_of_an_overloaded_host_has_longer_by_what_the_imports_took(harm):
    time_s = [0.0]
    late, hung, never = (
        Probe(Device(number, "", {"JAX_PLATFORMS": "cpu"}), 60, lambda: time_s[0]) for number in (3, 1, 3)
    )
    until(lambda: hung.result() or hung._imported_at is not None or None)
    time_s[0] = 59.0
    assert hung.result() is None
    time_s[0] = 61.0
    assert hung.result() == Finding(hung.device, "it has not computed within 60 s", 61.0)
    time_s[0] = 100.0  # ten times as long as imports take at most on a host with time to spare
    assert late.result() is None
    never._child.send_signal(signal.SIGSTOP)
    harm.touch()
    until(lambda: late._imported_at or late.result())
    assert late._limit() == (100.0, 600.0, "computed")
    time_s[0] = 699.0
    assert until(late.result) == Finding(late.device, "", 699.0)
    assert never.result() == Finding(never.device, "it has not imported JAX within 600 s", 699.0)
