"""What the doctor says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import jax

import gtp_jax
from gtp_jax.cli import _doctor, main


def test_machine_that_passes_these_tests_is_well(capsys):
    jax.devices()  # started here with its 8 devices
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "devices", "CUDA", "tokenizers"):
        assert f" {name} " in printed
    assert "8 x virtual CPU devices; a sum over all of them is right" in printed
    assert "Training works here" in printed


def test_oldest_versions_are_those_of_the_package():
    project = tomllib.loads((Path(gtp_jax.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert dict(line.split(",")[0].split(">=") for line in project["dependencies"]) == _doctor.NEEDED
    assert project["requires-python"] == f">={_doctor.PYTHON}"


def test_missing_and_old_packages_are_broken_and_have_a_remedy(monkeypatch, capsys):
    monkeypatch.setattr(_doctor, "NEEDED", {"no-such-package": "1.0", "jax": "99.0"})
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "BROKEN  no-such-package" in printed and "not installed" in printed
    assert f"BROKEN  jax                 {jax.__version__}, older than 99.0" in printed
    assert 'pip install --upgrade "no-such-package>=1.0"' in printed
    assert "2 broken: training cannot work here." in printed
