"""`gtp-jax train` with experts divided over ep: what it logs, saves and goes on from."""

import pytest

from gtp_jax.checkpoint import Checkpoints

from .runs import finish, read_records, small, start, train, write_text

MODEL = dict(preset="tiny-moe", router_bias_rate=0.001, shared_hidden=32, transport="padded")


@pytest.mark.slow
def test_the_load_of_experts_is_logged_each_step_and_their_options_are_the_models(tmp_path):
    text = write_text(tmp_path / "text")
    train(small(text, tmp_path / "run", steps=4, gtp=2, ep=2, tp=2, eval_every=4, save_every=4, **MODEL))
    steps = [record for record in read_records(tmp_path / "run") if "loss" in record]
    assert len(steps) == 4 and all(1 <= record["expert_load"] <= 8 / 2 for record in steps)
    saved = Checkpoints(tmp_path / "run/checkpoints", read_only=True).manifest()["extra"]["model"]
    assert saved["routing"] == {"bias_rate": 0.0} and saved["shared_hidden"] == 32
    # without a bias there is no load to report; and the parameters are another model's
    plain = small(text, tmp_path / "plain", steps=1, gtp=2, ep=2, tp=2, eval_every=4, save_every=4, preset="tiny-moe")
    refused = start([*plain, f"--from={tmp_path / 'run'}"])
    output = finish(refused)
    assert refused.returncode == 2 and "routing: {'bias_rate': 0.0} there, None here" in output
