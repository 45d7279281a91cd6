"""How often snapshots are taken, and how many steps a failure costs at most."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import naming
from selection import others_full

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.checkpoint._sums import SummedArrays
from gtp_jax.runner.elastic._snapshots import COST, Cadence, Snapshots
from gtp_jax.runner.trainer import state_is_finite

seconds = st.floats(1e-4, 1e3)


def saving(step: int, state: Any) -> Callable[[Checkpoints], bool]:
    """What the loop gives to write a state."""

    def save(target: Checkpoints) -> bool:
        target.save(step, state)
        return True

    return save


@given(st.integers(1, 1000))
def test_an_interval_is_what_a_failure_costs_at_most(steps):
    cadence = Cadence.of_interval(steps)
    assert cadence.most_lost == steps and cadence.every >= max(1, cadence.committed_after)


@given(seconds, seconds, seconds)
def test_a_chosen_cadence_costs_little_waits_for_nothing_and_is_the_shortest(step_s, blocked_s, written_s):
    every = Cadence.of_cost(step_s=step_s, blocked_s=blocked_s, written_s=written_s).every

    def good(steps: int) -> bool:
        return blocked_s <= COST * steps * step_s * (1 + 1e-9) and written_s <= steps * step_s * (1 + 1e-9)

    assert good(every) and (every == 1 or not good(every - 2))


@pytest.mark.parametrize(
    ("interval", "writer_s"), others_full([(1, 0), (3, 0), (5, 0), (2, 0.2), (3, 0.2)], [(1, 0), (3, 0.2)])
)
def test_at_any_step_a_failure_costs_the_interval_at_most(interval, writer_s, tmp_path, monkeypatch):
    """Training waits for a slow writer."""
    finish, committed = SummedArrays.finalize, Checkpoints(tmp_path, read_only=True)
    slow = lambda self, directory: time.sleep(writer_s) or finish(self, directory)  # noqa: E731
    monkeypatch.setattr(SummedArrays, "finalize", slow)
    snapshots = Snapshots(tmp_path, interval, None, lambda _: None)
    for step in range(1, 12):
        # a failure at this moment, in step `step`, would lose the steps made since the last commit
        assert step - 1 - (committed.latest() or 0) <= interval
        state = {"w": jnp.full(3, float(step)), "step": jnp.int32(step)}
        snapshots.stepped(step, state, saving(step, state))
    snapshots.close()
    assert committed.latest() is not None


def test_a_snapshot_that_was_not_taken_is_due_at_once(tmp_path):
    snapshots = Snapshots(tmp_path, 6, None, lambda _: None)
    taken = []
    for step in (1, 2, 3, 3, 4, 5, 6):  # the first step 3 turns out not to be finite, and another one gets its number
        state, finite = {"w": jnp.full(3, float(step))}, step != 3 or taken == [1, 2, 3]
        snapshots.stepped(step, state, saving(step, state) if finite else lambda _: False)
        taken.append(step)
        if step == 4:
            snapshots.wait()
            assert Checkpoints(tmp_path, read_only=True).latest() == 3
    snapshots.close()
    assert Checkpoints(tmp_path, read_only=True).latest() == 6


def test_training_does_not_run_ahead_of_a_snapshot_that_is_never_committed(tmp_path):
    snapshots = Snapshots(tmp_path, 4, None, lambda _: None)
    state = {"w": jnp.ones(3)}
    with pytest.raises(RuntimeError, match=naming("step 2")):
        for step in range(1, 5):
            snapshots.stepped(step, state, lambda _: True)
    assert step == 4
    snapshots.close()


def test_the_cadence_is_measured_and_reported(tmp_path):
    reports = []
    snapshots = Snapshots(tmp_path / "snapshots", None, Cadence(4, 4), reports.append)
    for step in range(1, 14):
        state = {"w": jnp.full(3, float(step))}
        snapshots.stepped(step, state, saving(step, state))
    snapshots.close()
    assert reports and set(reports[0]) == {"every", "committed_after", "step_s", "blocked_s", "written_s"}
    assert reports[0]["every"] * reports[0]["step_s"] * COST >= reports[0]["blocked_s"] * (1 - 1e-9)


def test_a_state_that_is_not_finite_is_not_taken(tmp_path):
    good, bad = {"w": jnp.ones(3), "n": jnp.int32(1)}, {"w": jnp.array([1.0, jnp.nan]), "n": jnp.int32(1)}
    assert state_is_finite(good) and not state_is_finite(bad)
    snapshots = Snapshots(tmp_path / "snapshots", 1, None, lambda _: None)
    snapshots.stepped(1, bad, saving(1, bad))
    snapshots.close()
    assert Checkpoints(tmp_path / "snapshots", read_only=True).latest() is None


def test_the_later_of_snapshot_and_checkpoint_is_restored(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    state = {"w": jax.device_put(jnp.ones(3), jax.devices()[0])}
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    snapshots = Snapshots(tmp_path / "snapshots", 1, None, lambda _: None)
    assert snapshots.source(checkpoints, like) is checkpoints
    snapshots.stepped(2, state, saving(2, state))
    snapshots.wait()
    checkpoints.save(1, state)
    checkpoints.wait()
    assert snapshots.source(checkpoints, like) is not checkpoints
    checkpoints.save(3, state)
    checkpoints.wait()
    assert snapshots.source(checkpoints, like) is checkpoints
    snapshots.close()
    checkpoints.close()
