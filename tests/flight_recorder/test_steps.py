"""Steps are timed from outside, without the time in which they are compiled or the process is suspended."""

import jax
import jax.numpy as jnp
import pytest

import gtp_jax as gtp
from gtp_jax.flight_recorder import Steps, active


class Result:
    """A result of a step that ends when the test says so."""

    size = 1

    def __init__(self):
        self.ready = False

    def is_ready(self):
        return self.ready


def test_a_step_lasts_from_its_call_or_the_end_of_the_one_before(monkeypatch):
    monkeypatch.setattr("jax.Array", Result)
    now, results = [0.0], [Result(), Result()]
    steps = Steps(lambda: now[0])
    for result in results:
        steps.begin()
        steps.launched({"loss": result})
    assert steps.begun == steps.in_flight == 2 and steps.median_s is None
    now[0] = 3.0
    assert steps.look() == 3.0
    results[0].ready = True
    assert steps.look() == 0.0 and steps.median_s == 3.0
    now[0] = 8.0
    assert steps.look(suspended_s=4.0) == 1.0
    results[1].ready, now[0] = True, 9.0
    assert steps.look() == 0.0 and steps.in_flight == 0 and steps.median_s == 2.5
    steps.begin()
    steps.launched(None)  # the call has failed
    assert steps.in_flight == 0


def test_a_step_that_is_called_is_timed_but_not_while_it_is_compiled():
    now, seen = [0.0], []
    steps = Steps(lambda: now[0])
    steps.begin()

    @jax.jit
    def traced(x):
        now[0] = 50.0
        seen.append((steps.look(), steps.compiles))
        return x

    traced(jnp.ones(3))
    now[0] += 2.0
    assert seen == [(0.0, True)] and steps.look() == 2.0 and not steps.compiles
    assert steps.python().startswith("test_a_step_that_is_called_is_timed_but_not_while_it_is_compiled (test_steps.py:")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"factor": 1}, "`factor` is 1; it must be a finite number above 1"),
        ({"factor": True}, "`factor` is True"),
        ({"at_least": 0}, "`at_least` is 0; it must be a finite number above 0"),
        ({"at_least": float("inf")}, "`at_least` is inf"),
        ({"folder": "/no/such"}, "`folder` is '/no/such', which is not a folder. Make it first"),
    ],
)
def test_bad_arguments_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        gtp.recorder(**arguments)
    assert active() is None


def test_there_is_one_recorder_and_it_records_steps_of_ones_own():
    with gtp.recorder() as recorder:
        with pytest.raises(ValueError, match="a recorder runs already in this process. Call its `close"):
            gtp.recorder()
        recorder.step(jnp.ones(3) + 1)
        assert recorder.steps.begun == 1 and active() is recorder
    assert active() is None


@pytest.mark.parametrize("alarm", [False, True])
def test_a_process_says_where_its_step_hangs_by_its_duration_or_by_an_alarm(alarm, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr("jax.Array", Result)
    with gtp.recorder(tmp_path, at_least=1e6 if alarm else 0.1) as recorder:
        recorder.alarm = alarm
        recorder.step(Result())
        while not recorder.said:
            pass
    said = capfd.readouterr().err
    assert "gtp recorder: step 1 hangs: no process is behind the others; process 0 on " in said
    assert f"Record: {tmp_path / 'record-0.txt'}" in said
    record = (tmp_path / "record-0.txt").read_text()
    assert "step 1" in record and "test_a_process_says_where_its_step_hangs" in record
