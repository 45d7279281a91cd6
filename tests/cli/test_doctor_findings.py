"""What the doctor says."""

from __future__ import annotations

import tomllib
import types
from pathlib import Path

import jax
import pytest

import gtp_jax
from gtp_jax.native import _library
from gtp_jax.runner.cli import _doctor, main
from gtp_jax.train import GPU_OPTIONS, GPU_OPTIONS_WITH_TP, Option, compile_options


def test_machine_that_passes_these_tests_is_well(capsys):
    jax.devices()  # started here with its 8 devices
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "devices", "CUDA", "tokenizers"):
        assert f" {name} " in printed
    assert "8 x virtual CPU devices" in printed and "ppermute: results are correct" in printed
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


def test_every_option_of_the_library_is_listed_with_its_reason_and_known_to_xla(monkeypatch, capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "this version knows all that the library sets" in printed
    for name, option in (*GPU_OPTIONS.items(), *GPU_OPTIONS_WITH_TP.items()):
        assert any(name in line and option.reason in line for line in printed.splitlines())
    monkeypatch.setattr(_doctor, "GPU_OPTIONS", {"xla_gpu_of_another_version": Option(True, "none")})
    assert main(["doctor"]) == 1
    assert "this version lacks xla_gpu_of_another_version" in capsys.readouterr().out


def test_an_option_in_xla_flags_is_left_to_its_user(monkeypatch, capsys):
    name = "xla_gpu_all_gather_combine_threshold_bytes"
    assert name in compile_options("gpu")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 --{name}=12345")
    left = compile_options("gpu")
    assert name not in left and set(left) == set(GPU_OPTIONS) - {name}
    assert compile_options("gpu", {name: 7})[name] == 7
    assert main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if name in line]
    assert "12345" in line and f"the library would use {GPU_OPTIONS[name].value}" in line


@pytest.mark.parametrize(
    ("architectures", "machine_code", "translated", "none"),
    [
        ("90a-real 80-virtual", ["9.0"], ["8.0", "8.6", "9.1", "10.0"], ["7.5"]),
        ("90a-real", ["9.0"], [], ["8.6", "9.1", "10.0"]),
        ("90a", ["9.0"], [], ["8.6", "9.1"]),
        ("80-real 120a-real", ["8.0", "8.6", "12.0"], [], ["7.5", "9.0", "12.1"]),
        ("86", ["8.6", "8.9"], ["9.0", "12.0"], ["8.0"]),
        ("100f", ["10.0", "10.3"], [], ["9.0", "12.0"]),
        ("100f-virtual", [], ["10.0", "10.3"], ["9.0", "12.0"]),
    ],
)
def test_the_doctor_says_in_which_form_this_gpu_has_kernels(architectures, machine_code, translated, none, monkeypatch):
    built = pytest.importorskip("gtp_jax.native._native")
    monkeypatch.setattr(built, "cuda_architectures", architectures)
    monkeypatch.setattr(built, "cuda_version", "13.0")
    monkeypatch.setattr(_library, "_has", lambda target, platform: True)  # also if there was no nvcc
    monkeypatch.setattr(_doctor.jax, "default_backend", lambda: "gpu")
    wanted = {
        **dict.fromkeys(machine_code, ("ok", f"({architectures})")),
        **dict.fromkeys(translated, ("optional", "translated from PTX by the driver")),
        **dict.fromkeys(none, ("broken", "can run")),
    }
    for capability, (status, said) in wanted.items():
        devices = [types.SimpleNamespace(compute_capability=capability)]
        monkeypatch.setattr(_doctor.jax, "devices", lambda devices=devices: devices)
        found = _doctor._kernels()
        assert found.status == status and found.found.endswith(said), capability
        assert (f"CUDAARCHS={capability.replace('.', '')}" in found.remedy) == (status != "ok")
