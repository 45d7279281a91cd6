"""Two processes train as one does, also without a device; and when one process dies, the other says so and ends."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from gtp_jax.checkpoint import Checkpoints

from .runs import logged, losses, processes, read_records, small, train, wait_until, write_text

MESH = {"dp": 2, "gtp": 2, "tp": 2}


@pytest.mark.slow
def test_two_processes_equal_one_but_for_the_order_of_sums(text, tmp_path):
    flags = dict(MESH, steps=4, lr=1e-3)
    train(small(text, tmp_path / "one", **flags))
    with processes(2, small(text, tmp_path / "two", **flags), tmp_path) as runs:
        assert [run.wait(120) for run in runs] == [0, 0], (tmp_path / "process0.txt").read_text()[-3000:]
    one, two = read_records(tmp_path / "one"), read_records(tmp_path / "two")
    assert [sorted(r) for r in one] == [sorted(r) for r in two]  # one process logs, once
    for found, expected in zip(two, one, strict=True):
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, err_msg=f"{name} of {expected}")
    assert Checkpoints(tmp_path / "two" / "checkpoints", read_only=True).steps() == [2, 4]
    speaks, silent = ((tmp_path / f"process{i}.txt").read_text() for i in range(2))
    assert "held-out loss" in speaks and "8 virtual CPU devices of 2 processes" in speaks
    assert "held-out" not in silent and "collectives" not in silent


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_dead_or_hanging_process_ends_the_other_with_the_last_checkpoint(victim, number, text, tmp_path):
    out = tmp_path / "run"
    with processes(2, small(text, out, **MESH, steps=100_000, eval_every=100_000, save_every=10), tmp_path) as runs:
        wait_until(lambda: logged(out, 12), runs[victim])
        runs[victim].send_signal(number)
        began = time.monotonic()
        assert runs[1 - victim].wait(180) not in (0, None)
        assert time.monotonic() - began < 60
        time.sleep(5)  # the last word may come from the guard, which outlives the process
    latest = Checkpoints(out / "checkpoints", read_only=True).latest()
    assert latest is not None
    output = (tmp_path / f"process{1 - victim}.txt").read_text()
    assert f"gtp-jax: process {1 - victim} cannot go on: " in output, output[-3000:]
    assert f"The last checkpoint is of step {latest}" in output
    assert f"gtp-jax train --resume --out {out}" in output
    if number == signal.SIGSTOP:
        assert "; this process is " in output, output[-3000:]
        assert f"hangs: process {victim} on " in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_process_stops_both_after_the_same_step(number, text, tmp_path):
    out = tmp_path / "run"
    with processes(2, small(text, out, **MESH, steps=100_000, eval_every=100_000, save_every=99_000), tmp_path) as runs:
        wait_until(lambda: logged(out, 2), runs[1])
        runs[1].send_signal(number)
        codes = [run.wait(180) for run in runs]
    output = (tmp_path / "process0.txt").read_text()
    assert codes == [128 + number] * 2, output[-3000:]
    steps = Checkpoints(out / "checkpoints", read_only=True).steps()
    assert len(steps) == 1
    assert f"stopped by a signal after step {steps[0]}. The last checkpoint is of step {steps[0]}" in output


def test_all_processes_name_everything_in_which_they_differ(text, tmp_path):
    other = write_text(tmp_path / "other", documents=41)
    differ = f"--data={other} --seed=7 --batch=16 --lr=0.5 --steps=9 --save-every=3 --gtp=4 --tp=1".split()
    named = {"seed": (0, 7), "batch": (8, 16), "lr": ("null", 0.5), "steps": (8, 9), "save-every": (2, 3)}
    named |= {"gtp": (2, 4), "tp": (2, 1)}
    lines = ["what is in the text: ", *(f"--{n}: {x} in process 0; {y} in process 1" for n, (x, y) in named.items())]
    with processes(2, small(text, tmp_path / "run", **MESH), tmp_path, last=differ) as runs:
        assert [run.wait(180) for run in runs] == [2, 2]
    for i in range(2):
        output = (tmp_path / f"process{i}.txt").read_text()
        assert [line for line in lines if f"\n  {line}" not in output] == [], output[-3000:]
        assert output.count(" in process 0; ") == len(lines)  # and nothing else
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_processes_start_from_the_parameters_of_a_checkpoint(text, tmp_path):
    train(small(text, tmp_path / "one", **MESH, steps=2))
    with processes(2, small(text, tmp_path / "two", **MESH, steps=2, **{"from": tmp_path / "one"}), tmp_path) as runs:
        assert [run.wait(120) for run in runs] == [0, 0], (tmp_path / "process0.txt").read_text()[-3000:]
    last = [r["held_out"] for r in read_records(tmp_path / "one") if "held_out" in r][-1]
    first = next(r["held_out"] for r in read_records(tmp_path / "two") if "held_out" in r)
    np.testing.assert_allclose(first, last, rtol=1e-4)


HEALTHY = {"dp": 2, "tp": 2, "batch": 9, "lr": 1e-3, "dtype": "float32", "save_every": 2, "eval_every": 2}
LOST = ["--failed-devices", "3"]


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
def test_hosts_of_two_devices_and_one_equal_one_process(text, tmp_path):
    train([*small(text, tmp_path / "one", **HEALTHY, steps=4), *LOST])
    flags = [*small(text, tmp_path / "two", **HEALTHY, steps=4), *LOST, "--local-devices=2"]
    with processes(2, flags, tmp_path, last=["--local-devices=1"]) as runs:
        assert [run.wait(300) for run in runs] == [0, 0], (tmp_path / "process0.txt").read_text()[-6000:]
    found, wanted = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.full
def test_hosts_of_unequal_devices_are_refused_without_failed_ones(text, tmp_path):
    flags = small(text, tmp_path / "run", gtp=3, batch=9, local_devices=2)
    with processes(2, flags, tmp_path, last=["--local-devices=1"]) as runs:
        assert [run.wait(120) for run in runs] == [2, 2]
    for i in range(2):
        output = " ".join((tmp_path / f"process{i}.txt").read_text().split())
        assert "devices: 2 x cpu in process 0; 1 x cpu in process 1" in output and "--failed-devices" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_degrees_that_do_not_divide_the_sequence_train_and_evaluate(text, tmp_path):
    flags = HEALTHY | {"tp": 4, "batch": 14, "steps": 2, "seq": 32}
    train(small(text, tmp_path / "healthy", **flags))
    wanted = losses(tmp_path / "healthy")
    assert {(2, "loss"), (2, "held_out")} <= wanted.keys()
    for failed in (["7"], ["0", "7"]):  # one replica has tp 3, then both
        out = tmp_path / "".join(failed)
        train([*small(text, out, **flags), "--failed-devices", *failed])
        assert losses(out) == pytest.approx(wanted, rel=1e-4), failed
