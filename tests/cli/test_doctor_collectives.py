"""The doctor runs the collectives themselves, and says which fails how."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from gtp_jax.runner.cli import _doctor_collectives as collectives
from gtp_jax.runner.cli import _doctor_versions as versions
from gtp_jax.runner.cli import main
from gtp_jax.train import Nccl

TOGETHER = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1", "jax-cuda13-pjrt": "0.12.0.1"}


def test_every_collective_gives_what_numpy_gives():
    found = collectives.check_collectives()
    assert found.status == "ok", found
    assert found.found == "all_gather, psum, pmax, psum_scatter, all_to_all, ppermute: results are correct"


@pytest.mark.parametrize("name", [c.name for c in collectives.COLLECTIVES])
def test_a_wrong_result_of_any_collective_is_named(name, monkeypatch):
    (right,) = [c for c in collectives.COLLECTIVES if c.name == name]
    wrong = right._replace(run=lambda x: right.run(x).at[3].add(1))
    monkeypatch.setattr(collectives, "COLLECTIVES", (wrong,))
    found = collectives.check_collectives()
    assert found.status == "broken"
    first = jnp.dtype(right.dtypes[0]).name
    count = jax.device_count()
    assert (
        f"{name}: {count} of " in found.found and f" values are wrong ({first}, 64 elements per device)" in found.found
    )


def test_a_collective_that_fails_is_named_with_its_error(monkeypatch, capsys):
    (scatter,) = [c for c in collectives.COLLECTIVES if c.name == "psum_scatter"]
    uneven = scatter._replace(run=lambda x: lax.psum_scatter(x[:3], "devices", tiled=True))
    monkeypatch.setattr(collectives, "COLLECTIVES", (uneven,))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "BROKEN  collectives" in printed and "psum_scatter: " in printed and "must be divisible" in printed
    assert "(float32, 64 elements per device)" in printed and "1 broken: training cannot work here" in printed


def test_processes_meet_and_a_failure_names_the_process(monkeypatch):
    found = collectives.check_processes(0)
    assert (found.status, found.found) == ("ok", "2 processes meet in sync_global_devices")
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    found = collectives.check_processes(0)
    assert found.status == "broken"
    assert found.found.startswith("process 0 of 2 fails in sync_global_devices: ")


def test_versions_released_together_fit():
    assert not list(versions.misfits(TOGETHER, gpu=True))


@pytest.mark.parametrize("name", ["jax-cuda13-plugin", "jax-cuda13-pjrt"])
def test_a_plugin_of_another_release_is_named(name):
    (found,) = versions.misfits({**TOGETHER, name: "0.11.2"}, gpu=True)
    assert (found.name, found.status) == (name, "broken")
    assert found.found == "0.11.2 does not fit jaxlib 0.12.0.1, which does not use it"
    assert found.remedy == f'pip install "{name}==0.12.0.1"'
    (found,) = versions.misfits({**TOGETHER, name: "0.11.2"}, gpu=False)
    assert found.status == "optional"


def test_a_jaxlib_of_another_release_is_named():
    (found,) = versions.misfits({"jax": "0.12.0.1", "jaxlib": "0.11.2"}, gpu=True)
    assert (found.name, found.status) == ("jax and jaxlib", "optional")
    assert found.found == "0.12.0.1 with jaxlib 0.11.2: JAX accepts it, but tests each release with its own jaxlib"
    assert found.remedy == 'pip install "jaxlib==0.12.0.1"'


def test_an_nccl_that_jax_cannot_use_is_named():
    assert versions.nccl(Nccl("2.29.2", True), too_old=False) == versions.Finding("NCCL", "ok", "2.29.2")
    assert versions.nccl(None, too_old=False).status == "broken"
    found = versions.nccl(Nccl("2.28.9", False), too_old=True)
    assert found.found == "2.28.9, older than 2.29.2: with this jaxlib a plain `lax.psum` fails"
    assert 'pip install "nvidia-nccl-cu13>=2.29.2"' in found.remedy
    assert "XLA_FLAGS=--xla_gpu_experimental_use_collective_kernels= before JAX starts" in found.remedy
