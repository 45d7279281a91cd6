"""A run whose processes are killed, stopped or raise goes on, and ends with the losses of a run that was left alone."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gtp_jax.runner._exit_codes import DIVERGED

from . import kills
from .fleets import TIMEOUT_S, elastic, events, finish, flags, logged, read_records, wait, write_text
from .kills import OF_TWO, harmed_run

# One process of a fleet of three is lost: 9 sequences are not divisible by the two that are left.
SMALL = dict(steps=12, batch=9, gtp=3, eval_every=6, save_every=100, snapshot_interval=2)
KILLS = 50


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def left_alone(text, tmp_path_factory) -> Callable[[dict], list[dict]]:
    """Returns the log of such a run in one process, without a supervisor."""

    @functools.cache
    def run(batch: int, gtp: int, steps: int) -> list[dict]:
        changes = {**SMALL, "batch": batch, "gtp": gtp, "steps": steps}
        return kills.left_alone(text, tmp_path_factory.mktemp("alone"), changes)

    return lambda changes: run(changes["batch"], changes["gtp"], changes["steps"])


def assert_equal(out: Path, expected: list[dict]) -> None:
    assert kills.difference(out, expected) <= kills.TOLERANCE, (read_records(out), expected)


@pytest.mark.slow
def test_a_killed_process_whose_device_is_broken_leaves_a_run_on_the_others(text, left_alone, tmp_path):
    out = tmp_path / "run"
    with elastic(flags(text, out, **SMALL), tmp_path, DEVICE_BROKEN="1") as run:
        wait(lambda: logged(out, 5), run)
        [fleet] = events(out, "fleet")
        os.kill(fleet["processes"][1], signal.SIGKILL)
        output = finish(run, tmp_path)
    assert_equal(out, left_alone(SMALL))
    [failure], [lost], [recovered] = (events(out, name) for name in ("failure", "lost", "recovered"))
    assert (failure["kind"], failure["device"], lost["device"]) == ("killed", 1, 1)
    assert "process 1 (virtual CPU device 1) was ended by SIGKILL" in failure["text"]
    assert "virtual CPU device 1 is no longer used: this device is broken" in output
    assert [fleet["degrees"]["gtp"] for fleet in events(out, "fleet")] == [3, 2]
    assert events(out, "fleet")[1]["devices"] == [0, 2]
    assert recovered["step"] >= 4 and recovered["steps_lost"] <= 2  # from memory: there is no checkpoint yet
    parts = [recovered[name] for name in ("detection_s", "start_s", "restore_s", "compile_s", "step_s")]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(recovered["total_s"])
    [end] = events(out, "end")
    assert (end["failures"], end["status"], 0 < end["goodput"] < 1) == (1, 0, True)
    assert f"goodput {end['goodput']:.1%}" in output
    memory = memory_of(out)
    assert memory.name.startswith("gtp-jax-") and not memory.exists()


@pytest.mark.slow
def test_a_replica_that_lost_a_device_goes_on_at_a_lower_tp(text, left_alone, tmp_path):
    out = tmp_path / "run"
    changes = {**SMALL, "batch": 12, "gtp": 1, "steps": 12}
    with elastic([*flags(text, out, **changes), "--dp=2", "--tp=2"], tmp_path, DEVICE_BROKEN="1") as run:
        wait(lambda: logged(out, 5), run)
        os.kill(events(out, "fleet")[0]["processes"][1], signal.SIGKILL)
        output = finish(run, tmp_path)
    assert "replicas of gtp 1 x tp 1 on 4 sequences; gtp 1 x tp 2 on 8 sequences" in output
    assert [fleet["devices"] for fleet in events(out, "fleet")] == [[0, 1, 2, 3], [0, 2, 3]]
    assert_equal(out, left_alone(changes))  # one device


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_harm_at_a_random_moment_to_a_random_process_changes_no_loss(seed, text, left_alone, tmp_path):
    outcome = harmed_run(seed, text, tmp_path, left_alone(OF_TWO), TIMEOUT_S)
    assert outcome.equal, outcome
    assert all(event["steps_lost"] <= 2 for event in outcome.recovered)


@pytest.mark.slow
def test_a_process_that_ends_amid_a_snapshot_costs_the_interval_at_most(text, left_alone, tmp_path):
    out = tmp_path / "run"
    with elastic(flags(text, out, **OF_TWO), tmp_path, AMID_SNAPSHOT="1") as run:
        wait(lambda: logged(out, 6), run)
        os.kill(events(out, "fleet")[0]["processes"][1], signal.SIGUSR2)
        finish(run, tmp_path)
    [recovered] = events(out, "recovered")
    assert recovered["steps_lost"] <= OF_TWO["snapshot_interval"] and recovered["step"] >= 5
    assert_equal(out, left_alone(OF_TWO))


@pytest.mark.slow
def test_a_device_that_fails_twice_is_dropped_and_comes_back_when_asked(text, left_alone, tmp_path):
    out, steps = tmp_path / "run", 60
    changes = {**SMALL, "steps": steps}
    with elastic(flags(text, out, **changes), tmp_path) as run:
        for count, step in ((1, 3), (2, 6)):
            wait(lambda step=step: logged(out, step), run)
            wait(lambda count=count: len(events(out, "training")) >= count, run)
            os.kill(events(out, "fleet")[-1]["processes"][2], signal.SIGKILL)
            wait(lambda count=count: len(events(out, "failure")) >= count, run)
        wait(lambda: len(events(out, "recovered")) >= 2, run)
        (out / "elastic" / "rejoin.2").touch()
        finish(run, tmp_path)
    assert [lost["device"] for lost in events(out, "lost")] == [2]
    assert [rejoin["device"] for rejoin in events(out, "rejoin")] == [2]
    assert [len(fleet["devices"]) for fleet in events(out, "fleet")] == [3, 3, 2, 3]
    assert_equal(out, left_alone(changes))


@pytest.mark.slow
def test_a_smaller_fleet_finds_the_program_that_a_rehearsal_has_compiled(text, left_alone, tmp_path):
    out, compiled = tmp_path / "run", tmp_path / "compiled"
    changes = {**OF_TWO, "steps": 60}
    arguments = [*flags(text, out, **changes), "--rehearse"]
    with elastic(arguments, tmp_path, DEVICE_BROKEN="1", JAX_COMPILATION_CACHE_DIR=str(compiled)) as run:
        [rehearsal] = wait(lambda: events(out, "rehearsal"), run)
        assert rehearsal["compiled"], rehearsal
        before = steps_in(compiled)
        os.kill(events(out, "fleet")[0]["processes"][1], signal.SIGKILL)
        finish(run, tmp_path)
    assert [len(fleet["devices"]) for fleet in events(out, "fleet")] == [2, 1]
    assert len(before) == 1  # training on one device; several processes on CPU use no cache
    assert len(steps_in(compiled) - before) == 1  # evaluation on one
    assert_equal(out, left_alone(changes))


@pytest.mark.slow
def test_a_damaged_snapshot_is_not_used(text, left_alone, tmp_path):
    out = tmp_path / "run"
    changes = {**SMALL, "steps": 30, "snapshot_interval": 20, "save_every": 5}
    with elastic(flags(text, out, **changes), tmp_path) as run:
        wait(lambda: events(out, "snapshot"), run)
        memory = memory_of(out)
        [fleet] = events(out, "fleet")
        for pid in fleet["processes"]:
            os.kill(pid, signal.SIGSTOP)
        arrays = [path for path in (memory / "snapshots").rglob("*") if path.is_file() and "/d/" in str(path)]
        largest = max(arrays, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 0xFF
        largest.write_bytes(bytes(content))
        os.kill(fleet["processes"][0], signal.SIGKILL)
        finish(run, tmp_path)
    kinds = [failure["kind"] for failure in events(out, "failure")]
    assert kinds == ["killed", "damaged"]
    assert_equal(out, left_alone(changes))


@pytest.mark.slow
def test_the_supervisors_own_death_leaves_no_process_and_its_snapshots_are_freed_by_the_next(
    text, left_alone, tmp_path
):
    out, snapshots = tmp_path / "run", tmp_path / "snapshots"
    snapshots.mkdir()  # of this run alone: the supervisor of any run that begins frees what others leave
    arguments = flags(text, out, **SMALL, snapshot_dir=snapshots)
    with elastic(arguments, tmp_path) as run:
        wait(lambda: events(out, "snapshot"), run)
        [fleet] = events(out, "fleet")
        run.kill()
        run.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in fleet["processes"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    memory = memory_of(out)
    assert memory.exists()
    with elastic([*arguments, "--resume"], tmp_path) as run:
        finish(run, tmp_path)
    assert not memory.exists()
    assert str(memory) in events(out, "start")[-1]["freed"]
    assert_equal(out, left_alone(SMALL))


@pytest.mark.slow
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(text, tmp_path):
    out = tmp_path / "run"
    with elastic(flags(text, out, **{**SMALL, "steps": 100_000}), tmp_path) as run:
        wait(lambda: logged(out, 3), run)
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) == 128 + signal.SIGTERM
    output = (tmp_path / "output.txt").read_text()
    assert "stopped by a signal after step" in output
    assert not events(out, "failure")


@pytest.mark.slow
def test_a_run_goes_back_within_its_fleet_and_its_status_is_that_of_a_run_without_a_supervisor(text, tmp_path):
    policy = dict(nonfinite="rollback", nonfinite_in_a_row=1, max_rollbacks=2, snapshot_interval=2)
    given = flags(text, tmp_path / "run", gtp=2, dtype="float32", lr=1e30, warmup=1, save_every=1, **policy)
    with elastic(given, tmp_path) as run:
        assert run.wait(TIMEOUT_S) == DIVERGED
    said = (tmp_path / "output.txt").read_text()
    assert said.count("is nan: back to step ") == 2, said[-3000:]
    assert "after the run has gone back 2 times (--max-rollbacks). Use a lower --lr" in said
    assert "failures: 0, steps lost: 0" in said
    assert [event["event"] for event in events(tmp_path / "run")].count("start") == 1


def steps_in(cache: Path) -> set[str]:
    """The compiled steps in a cache, of training and of evaluation, by name."""
    return {path.name for path in cache.iterdir() if path.name.startswith("jit_step") and "atime" not in path.name}


def memory_of(out: Path) -> Path:
    """Where the latest supervisor of a run keeps its snapshots."""
    return Path(events(out, "start")[-1]["text"].partition("snapshots in ")[2].partition(";")[0])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
