"""Two processes train as one does; and when one dies, the other says so and ends."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from gtp_jax.checkpoint import Checkpoints

from .runs import logged, processes, read_records, small, train, wait_until, write_text

MESH = {"dp": 2, "gtp": 2, "tp": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


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
    with processes(2, small(text, out, **MESH, steps=100_000, eval_every=100_000), tmp_path) as runs:
        wait_until(lambda: logged(out, 4), runs[victim])
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
    differ = [
        f"--data={other}",
        "--seed=7",
        "--batch=16",
        "--lr=0.5",
        "--steps=9",
        "--save-every=3",
        "--gtp=4",
        "--tp=1",
    ]
    lines = [
        "what is in the text: ",
        "--seed: 0 in process 0; 7 in process 1",
        "--batch: 8 in process 0; 16 in process 1",
        "--lr: null in process 0; 0.5 in process 1",
        "--steps: 8 in process 0; 9 in process 1",
        "--save-every: 2 in process 0; 3 in process 1",
        "--gtp: 2 in process 0; 4 in process 1",
        "--tp: 2 in process 0; 1 in process 1",
    ]
    with processes(2, small(text, tmp_path / "run", **MESH), tmp_path, last=differ) as runs:
        assert [run.wait(180) for run in runs] == [2, 2]
    for i in range(2):
        output = (tmp_path / f"process{i}.txt").read_text()
        assert "error: the processes of this run do not agree:" in output, output[-3000:]
        assert [line for line in lines if f"\n  {line}" not in output] == []
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


@pytest.mark.slow
def test_all_processes_refuse_if_one_does(text, tmp_path):
    missing = f"--data={tmp_path / 'missing'}"
    with processes(2, small(text, tmp_path / "run", **MESH), tmp_path, last=[missing]) as runs:
        assert [run.wait(180) for run in runs] == [2, 2]
    assert "error: process 1 refused to start" in (tmp_path / "process0.txt").read_text()
    assert "missing does not exist" in (tmp_path / "process1.txt").read_text()


@pytest.mark.slow
def test_unequal_devices_are_refused_by_all(text, tmp_path):
    with processes(2, small(text, tmp_path / "run"), tmp_path, last=["--local-devices=2"]) as runs:
        assert [run.wait(180) for run in runs] == [2, 2]
    for i in range(2):
        assert "devices: 4 x cpu in process 0; 2 x cpu in process 1" in (tmp_path / f"process{i}.txt").read_text()


@pytest.mark.slow
def test_directories_that_are_not_one_are_refused_by_all(text, tmp_path):
    with processes(2, small(text, tmp_path / "a"), tmp_path, last=[f"--out={tmp_path / 'b'}"]) as runs:
        assert [run.wait(180) for run in runs] == [2, 2]
    for i, out in enumerate("ab"):
        output = (tmp_path / f"process{i}.txt").read_text()
        assert f"`out` {tmp_path / out} is not shared" in output
        assert "did not appear within 10 s for process 1." in output
