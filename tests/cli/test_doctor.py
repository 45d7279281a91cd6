"""What the doctor says; it runs the collectives themselves."""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import pytest
from messages import naming

from gtp_jax.native import _library
from gtp_jax.runner.cli import _doctor_collectives as collectives
from gtp_jax.runner.cli import _doctor_host_link, main
from gtp_jax.runner.cli import _doctor_report as _doctor
from gtp_jax.runner.cli import _doctor_versions as versions
from gtp_jax.train import Nccl


def test_machine_that_passes_these_tests_is_well(capsys):
    jax.devices()  # started here with its 8 devices
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in ("python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "devices", "CUDA", "tokenizers"):
        assert f" {name} " in printed
    assert "8 x virtual CPU devices" in printed and "ppermute: results are correct" in printed
    assert re.search(r"\n-   host link +no GPU", printed)
    assert re.search(r"\nxla_gpu_enable_command_buffer +none +offload ", printed)
    assert "Training works here" in printed


def test_copies_to_the_host_are_timed_with_what_fits_into_its_memory(monkeypatch):
    monkeypatch.setattr(_doctor_host_link, "available_bytes", lambda: 1 << 23)
    found = _doctor_host_link.measured(jax.devices()[0])
    assert found.status == "ok" and re.search(naming("each way at once (1.05 MB) --offload masters"), found.found)
    monkeypatch.setattr(_doctor_host_link, "available_bytes", lambda: 1 << 22)
    found = _doctor_host_link.measured(jax.devices()[0])
    assert found.status == "optional" and "524 kB" in found.found and found.remedy


@pytest.fixture
def one_collective(monkeypatch):
    """Runs one in place of all."""
    monkeypatch.setattr(collectives, "COLLECTIVES", collectives.COLLECTIVES[:1])


def test_missing_and_old_packages_are_broken_and_have_a_remedy(one_collective, monkeypatch, capsys):
    monkeypatch.setattr(_doctor, "NEEDED", {"no-such-package": "1.0", "jax": "99.0"})
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "BROKEN  no-such-package" in printed and "not installed" in printed
    assert f"BROKEN  jax                 {jax.__version__}, older than 99.0" in printed
    assert 'pip install --upgrade "no-such-package>=1.0"' in printed
    assert "2 broken: training cannot work here." in printed


@pytest.mark.parametrize(
    ("architectures", "machine_code", "translated", "none"),
    [
        ("90a-real 80-virtual", ["9.0"], ["8.0", "8.6", "9.1", "10.0"], ["7.5"]),
        ("90a-real", ["9.0"], [], ["8.6", "9.1", "10.0"]),
        ("86", ["8.6", "8.9"], ["9.0", "12.0"], ["8.0"]),
        ("100f-virtual", [], ["10.0", "10.3"], ["9.0", "12.0"]),
    ],
)
def test_the_doctor_says_in_which_form_this_gpu_has_kernels(architectures, machine_code, translated, none, monkeypatch):
    built = _library._Facts([0, 1], "13.0", architectures, {"cpu": "", "CUDA": ""}, [])
    monkeypatch.setattr(_library, "_facts", lambda: built)
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


TOGETHER = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1", "jax-cuda13-pjrt": "0.12.0.1"}


def test_every_collective_gives_what_numpy_gives():
    found = collectives.check_collectives()
    assert found.status == "ok", found
    assert found.found == "all_gather, psum, pmax, psum_scatter, all_to_all, ppermute: results are correct"


def test_a_wrong_result_of_a_collective_is_named(monkeypatch):
    name = "psum_scatter"
    (right,) = [c for c in collectives.COLLECTIVES if c.name == name]
    wrong = right._replace(run=lambda x: right.run(x).at[3].add(1))
    monkeypatch.setattr(collectives, "COLLECTIVES", (wrong,))
    found = collectives.check_collectives()
    assert found.status == "broken"
    named = f"{name} {jax.device_count()} of wrong ({jnp.dtype(right.dtypes[0]).name}, 64 elements per device)"
    assert re.search(naming(named), found.found)


@pytest.mark.full
def test_processes_meet_and_a_failure_names_the_process(monkeypatch):
    found = collectives.check_processes(0)
    assert (found.status, found.found) == ("ok", "2 processes meet in sync_global_devices")
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    found = collectives.check_processes(0)
    assert found.status == "broken"
    assert found.found.startswith("process 0 of 2 fails in sync_global_devices: ")


def test_versions_that_were_not_released_together_are_named():
    assert not list(versions.misfits(TOGETHER, gpu=True))
    for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
        (found,) = versions.misfits({**TOGETHER, name: "0.11.2"}, gpu=True)
        assert (found.name, found.status) == (name, "broken")
        assert re.search(naming("0.11.2 jaxlib 0.12.0.1"), found.found)
        assert found.remedy == f'pip install "{name}==0.12.0.1"'
        (found,) = versions.misfits({**TOGETHER, name: "0.11.2"}, gpu=False)
        assert found.status == "optional"


def test_an_xla_that_computed_wrong_gradients_is_named_on_gpus():
    (found,) = versions.gradients(TOGETHER, gpu=True)
    assert found.status == "optional" and re.search(naming("0.12.0.1 gradients docs/install.md"), found.found)
    assert not list(versions.gradients(TOGETHER, gpu=False))
    assert not list(versions.gradients({**TOGETHER, "jaxlib": "0.11.2"}, gpu=True))


def test_an_nccl_that_jax_cannot_use_is_named():
    assert versions.nccl(Nccl("2.29.2", True), too_old=False) == versions.Finding("NCCL", "ok", "2.29.2")
    assert versions.nccl(None, too_old=False).status == "broken"
    found = versions.nccl(Nccl("2.28.9", False), too_old=True)
    assert re.search(naming("2.28.9 2.29.2 `lax.psum`"), found.found)
    assert 'pip install "nvidia-nccl-cu13>=2.29.2"' in found.remedy
    assert "XLA_FLAGS=--xla_gpu_experimental_use_collective_kernels= " in found.remedy
