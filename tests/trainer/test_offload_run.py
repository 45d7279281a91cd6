"""`gtp-jax train --remat offload`."""

import jax

from gtp_jax.runner.cli import main

from .runs import read_records, small, write_text


def test_a_run_that_offloads_has_the_losses_of_one_that_recomputes(tmp_path):
    jax.devices()
    (tmp_path / "text").mkdir()
    text = write_text(tmp_path / "text")
    losses = []
    for remat in ("nothing", "offload"):
        out = tmp_path / remat
        assert main(["train", *small(text, out, steps=3, remat=remat, eval_every=0, save_every=3)]) == 0
        losses.append([record["loss"] for record in read_records(out) if "loss" in record])
    assert losses[0] == losses[1] and len(losses[0]) == 3
