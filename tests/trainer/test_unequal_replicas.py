"""`gtp-jax train` goes on when devices are lost, and when they are back: the losses are those of the healthy run."""

from __future__ import annotations

import numpy as np
import pytest

from .runs import losses, processes, refused, small, train

HEALTHY = {"dp": 2, "tp": 2, "batch": 9, "lr": 1e-3, "dtype": "float32", "save_every": 2, "eval_every": 2}
LOST = ["--failed-devices", "3"]


def assert_alike(found, wanted):
    found, wanted = losses(found), losses(wanted)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, err_msg=str(key))


@pytest.mark.slow
def test_a_run_loses_a_device_then_gets_it_back_and_trains_on_the_same_batches(text, tmp_path):
    flags = HEALTHY | {"batch": 8}
    train(small(text, tmp_path / "healthy", **flags, steps=6))
    train(small(text, tmp_path / "hurt", **flags, steps=2))
    lost = [*small(text, tmp_path / "hurt", **flags, steps=4), "--resume", "--failed-devices", "3"]
    output = train(lost)
    assert "replicas of gtp 1 x tp 2 on 6 sequences; gtp 1 x tp 1 on 2 sequences" in output
    assert "changed steps from 2 to 4, failed_devices from () to (3,)" in output
    train([*small(text, tmp_path / "hurt", **flags, steps=6), "--resume", "--failed-devices"])
    assert losses(tmp_path / "hurt").keys() == losses(tmp_path / "healthy").keys()


@pytest.mark.slow
@pytest.mark.parametrize("failed", [("7",), ("0", "7")], ids=["unequal", "alike"])
def test_degrees_that_do_not_divide_the_sequence_train_and_evaluate(failed, text, tmp_path):
    flags = HEALTHY | {"tp": 4, "batch": 14, "steps": 2, "seq": 32}
    train([*small(text, tmp_path / "hurt", **flags), "--failed-devices", *failed])
    train(small(text, tmp_path / "healthy", **flags))
    assert_alike(tmp_path / "hurt", tmp_path / "healthy")


@pytest.fixture(scope="module")
def in_one_process(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    train([*small(text, out, **HEALTHY, steps=4), *LOST])
    return out


@pytest.mark.slow
def test_hosts_of_two_devices_and_one_equal_one_process(text, in_one_process, tmp_path):
    flags = [*small(text, tmp_path / "two", **HEALTHY, steps=4), *LOST, "--local-devices=2"]
    with processes(2, flags, tmp_path, last=["--local-devices=1"]) as runs:
        assert [run.wait(300) for run in runs] == [0, 0], (tmp_path / "process0.txt").read_text()[-6000:]
    assert_alike(tmp_path / "two", in_one_process)


@pytest.mark.full
def test_hosts_of_unequal_devices_are_refused_without_failed_ones(text, tmp_path):
    flags = small(text, tmp_path / "run", gtp=3, batch=9, local_devices=2)
    with processes(2, flags, tmp_path, last=["--local-devices=1"]) as runs:
        assert [run.wait(120) for run in runs] == [2, 2]
    output = " ".join((tmp_path / "process0.txt").read_text().split())
    assert "have different devices: devices: 2 x cpu in process 0; 1 x cpu in process 1" in output
    assert "If devices have failed, list their slots in the mesh with --failed-devices" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--failed-devices", "4"], "`failed_devices` 4 dp 2 gtp 1 tp"),
        (["--failed-devices", "0", "1", "2", "3"], "no replica"),
        (["--failed-devices", "3", "--replica-batches", "4", "4"], "8 rows `batch` 9"),
    ],
)
def test_plans_that_cannot_work_are_refused_at_the_start(flags, message, text, tmp_path, capsys):
    refused(capsys, message, "train", *small(text, tmp_path / "run", **HEALTHY), *flags)
    assert not (tmp_path / "run").exists()
