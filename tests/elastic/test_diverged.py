"""A run that diverges under a supervisor goes back by itself, and is not taken for one that failed."""

from __future__ import annotations

import pytest

from gtp_jax.runner._exit_codes import DIVERGED

from .fleets import TIMEOUT_S, elastic, events, flags, write_text


@pytest.mark.slow
def test_a_run_goes_back_within_its_fleet_and_its_status_is_that_of_a_run_without_a_supervisor(tmp_path):
    policy = dict(nonfinite="rollback", nonfinite_in_a_row=1, max_rollbacks=2, snapshot_interval=2)
    given = flags(
        write_text(tmp_path / "text"),
        tmp_path / "run",
        gtp=2,
        dtype="float32",
        lr=1e30,
        warmup=1,
        save_every=1,
        **policy,
    )
    with elastic(given, tmp_path) as run:
        assert run.wait(TIMEOUT_S) == DIVERGED
    said = (tmp_path / "output.txt").read_text()
    assert said.count("is nan: back to step ") == 2, said[-3000:]
    assert "after the run has gone back 2 times (--max-rollbacks). Use a lower --lr" in said
    assert "failures: 0, steps lost: 0" in said
    assert [event["event"] for event in events(tmp_path / "run")].count("start") == 1
