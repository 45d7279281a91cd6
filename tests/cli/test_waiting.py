"""Who waits is told what for, and for how long."""

from __future__ import annotations

import io
import threading
import time
from types import SimpleNamespace

from gtp_jax.runner.cli._waiting import waiting
from gtp_jax.runner.trainer._progress import Progress


def test_a_long_call_says_what_it_does_how_long_that_takes_and_what_has_passed(capsys):
    with waiting("inspect: compiling", "a minute", every_s=0.05):
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert "compiling" in lines[0] and "a minute" in lines[0]
    assert len(lines) > 2 and all("s so far" in line for line in lines[1:])
    assert not [one for one in threading.enumerate() if one.name == "waiting"]


def test_the_time_to_go_does_not_count_what_the_first_step_compiled(tmp_path, monkeypatch):
    printed = io.StringIO()
    monkeypatch.setattr("sys.stderr", printed)
    limits = SimpleNamespace(steps=1000, log_to=())
    job = SimpleNamespace(limits=limits, settings={}, per_step=(1, "tokens"), shown={}, learning_rate=lambda step: 0.1)
    with Progress(job, tmp_path / "log.jsonl", 0, lambda: None, lambda: None) as progress:  # pyright: ignore[reportArgumentType]
        bar = progress._bar
        bar.start_t = bar.last_print_t = bar.start_t - 60  # a minute of compiling
        for step in range(1, 4):
            progress.step(step, {"loss": 1.0, "grad_norm": 1.0})  # pyright: ignore[reportArgumentType]
            time.sleep(0.01)
        found = bar.format_dict
        assert found["n"] == 3 and found["initial"] == 1 and found["elapsed"] < 10
    assert "1/1000" in printed.getvalue()
