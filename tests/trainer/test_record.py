"""The record of a run: lines are only added, nothing secret is in it, and the time of all attempts is accounted for."""

from __future__ import annotations

import json

import pytest

from gtp_jax.runner.trainer import EventLog, events_in, read_lines, read_log
from gtp_jax.runner.trainer._account import goodput, seconds_by_cause
from gtp_jax.runner.trainer._attempt import attempt
from gtp_jax.runner.trainer._log import Log


def test_a_log_keeps_every_line_and_reads_as_the_steps_that_led_to_the_state(tmp_path):
    path = tmp_path / "log.jsonl"
    log = Log(path, 0)
    for step in (1, 2, 3):
        log.write(step, loss=float(step))
    log.close()
    with path.open("a") as file:
        file.write('{"note": "mine"}\n{"step": 4, "lo')  # a record without a step, and one that a kill has cut off
    log = Log(path, 2)
    log.write(3, loss=30.0)
    log.rewind(1)
    log.write(2, loss=20.0)
    log.close()
    assert [(r["step"], r["loss"]) for r in read_log(path)] == [(1, 1.0), (2, 20.0)]
    assert len(path.read_text().splitlines()) == 9
    assert read_log(tmp_path / "none.jsonl") == []


def test_an_attempt_records_versions_and_no_secret(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "JAX_COORDINATOR_PASSWORD", "NCCL_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
    found = json.dumps(attempt())
    assert "hunter2" not in found and "xla_cpu_multi_thread_eigen" in found
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"} <= json.loads(found)["versions"].keys()


@pytest.mark.full
def test_events_are_one_line_each_and_a_line_cut_off_is_ended(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "old"}\n{"event": "cut of')
    said = []
    EventLog(path, said.append, process=0).write("save", "saved", step=3)
    assert said == ["saved"] and [e["event"] for e in read_lines(path)] == ["old", "save"]
    assert len(path.read_text().splitlines()) == 3


def test_events_that_are_held_back_are_written_when_the_run_has_begun(tmp_path):
    path, said = tmp_path / "events.jsonl", []
    events = EventLog(path, said.append, held=True)
    events.write("start", "one")
    events.write("compile", "two")
    assert said == ["one", "two"] and not path.exists()
    events.release()
    events.write("ready")
    assert [event["event"] for event in read_lines(path)] == ["start", "compile", "ready"]


def test_what_others_have_added_to_a_record_is_left_out(tmp_path):
    path, needs = tmp_path / "events.jsonl", {"save": ("step",)}
    good = {"time": 1.0, "event": "save", "process": 0, "step": 4, "seconds": {"step": 2.0}}
    odd = [
        {"note": "mine"},
        {"time": "now", "event": "save", "step": 4},
        *({**good, name: value} for name, value in (("step", None), ("seconds", 5), ("event", []), ("text", 7))),
        {**good, "seconds": {"step": "2"}},
        {**good, "time": float("nan")},
        {**good, "step": 10**400},
    ]
    path.write_text("\n".join([*map(json.dumps, [*odd, good]), "1" * 5000, '{"a":' * 100_000]))
    assert events_in(path, needs) == [good]
    path.write_text("\n".join(map(json.dumps, [{"step": 1, "loss": "low"}, {"continued_from": "1"}, {"step": 2}])))
    assert read_log(path) == [{"step": 2}]


def test_seconds_of_every_attempt_go_to_a_cause():
    def event(time, name, number=None, /, **seconds):
        return {"time": time, "event": name, "process": 0, "step": number, "seconds": seconds}

    record = [
        {"time": 99.0, "event": "fleet"},  # a supervisor's
        event(100, "start", start=2.0),
        event(110, "ready", 0, start=2.0, restore=1.0, compile=7.0),
        event(121, "save", 10, start=2.0, restore=1.0, compile=7.0, step=10.0, save=1.0),
        event(126, "save", 14, start=2.0, restore=1.0, compile=7.0, step=14.0, save=2.0),
        event(132, "rollback", 10, start=2.0, restore=1.0, compile=7.0, step=20.0, save=2.0),  # 10 s of steps undone
        event(137, "save", 15, start=2.0, restore=1.0, compile=7.0, step=25.0, save=2.0),
        event(140, "nonfinite", 18, start=2.0, restore=1.0, compile=7.0, step=28.0, save=2.0),  # then killed
        event(160, "resume", start=2.0),
        event(165, "ready", 15, start=2.0, restore=1.0, compile=2.0),
        event(175, "end", 25, start=2.0, restore=1.0, compile=2.0, step=10.0),
    ]
    causes = seconds_by_cause(record)
    assert causes == pytest.approx(
        {"step": 25.0, "lost": 13.0, "down": 20.0, "start": 4.0, "restore": 2.0, "compile": 9.0, "save": 2.0}
    )
    assert sum(causes.values()) == pytest.approx(75.0)  # of 75 between the first event and the last
    assert goodput(causes) == pytest.approx(1 / 3)
    assert seconds_by_cause([]) == {"step": 0.0}
