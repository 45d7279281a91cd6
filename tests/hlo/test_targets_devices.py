"""Targets: what they are called, what they need, what they give."""

from __future__ import annotations

import pytest
from messages import naming

from gtp_jax import hlo
from gtp_jax.hlo import _targets

from .programs import h200_mesh, needs_target, stack


def test_target_names_a_chip_and_devices():
    assert hlo.parse_target("h200:8") == ("h200", 1, 8)
    assert hlo.parse_target("H100:4") == ("h100", 1, 4)
    assert hlo.parse_target("h200:512") == ("h200", 64, 512)
    assert hlo.parse_target("h200:12", gpus_per_host=4) == ("h200", 3, 12)


@pytest.mark.parametrize("text", ["h200", "h200:", "h200:0", "h200:x8", "8:h200:1", ""])
def test_malformed_target_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=naming("`target` CHIP:DEVICES `h200:8`")):
        hlo.parse_target(text)


def test_unknown_chip_and_devices_that_do_not_fill_their_hosts_are_refused():
    for named, text, options in (
        ("'b200' h100 h200", "b200:8", {}),
        ("12 devices hosts of 8", "h200:12", {}),
        ("hosts of 5 multiple", "h200:12", dict(gpus_per_host=5)),
    ):
        with pytest.raises(ValueError, match=naming(named)):
            hlo.parse_target(text, **options)


def test_missing_packages_are_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(_targets.REQUIRED, "gtp-jax-no-such-package", "nothing")
    hlo.topology_devices.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=naming("no-such-package (nothing)", 'pip install "gtp_jax[target]"')):
        hlo.topology_devices(hlo.parse_target("h200:8"))


@needs_target
def test_devices_are_gpus_in_a_process_whose_platform_is_cpu():
    devices = hlo.topology_devices(hlo.parse_target("h200:8"))
    assert [d.platform for d in devices] == ["gpu"] * 8
    assert {d.device_kind for d in devices} == {"NVIDIA H200"}


@pytest.mark.full
@needs_target
def test_many_hosts_compile_too():
    lowered = stack(h200_mesh(64), layers=1, size=1024, rows=8, how="scan")
    (gather,) = hlo.collectives(lowered.compile(compiler_options=dict(hlo.COMPILE_OPTIONS)).as_text())
    assert gather.group == 64 and gather.result_bytes == 2 * 1024 * 1024
    devices = hlo.topology_devices(hlo.parse_target("h200:64"))
    assert len({d.process_index for d in devices}) == 8
