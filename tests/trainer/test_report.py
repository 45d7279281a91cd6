"""What a report says of a loss is what was measured, and when."""

from __future__ import annotations

import types
from typing import Any

import pytest

from gtp_jax.runner.trainer._family_report import results
from gtp_jax.runner.trainer._loop import Outcome


@pytest.mark.parametrize(("last", "said"), [(30, ""), (156, "at step 30")])
def test_a_loss_that_was_measured_before_the_last_step_has_its_step(last, said, monkeypatch):
    monkeypatch.setattr("gtp_jax.runner.trainer._family_report._devices", lambda meshes: "8")
    text = types.SimpleNamespace(name="other", bytes_per_token=2.0)
    corpus: Any = types.SimpleNamespace(bytes_per_token=1.0, evaluated=[text])
    config: Any = types.SimpleNamespace(steps=156, adapters=None)
    model: Any = types.SimpleNamespace(param_count=lambda: 7)
    records = [{"step": 30, "held_out": 2.5, "loss on other": 3.0}, {"step": last, "loss": 1.0}]
    meshes: Any = None
    rows = dict(results(config, model, meshes, corpus, 7, Outcome(last, 0.0, None), records, 4.0))
    for name, loss in (("held-out loss", "2.500"), ("loss on other", "3.000")):
        assert loss in rows[name] and said in rows[name] and ("at step" in rows[name]) == bool(said)
