"""`gtp-jax bench recipes`: what is read, drawn and compared, and that the mistakes are the ones they are named for."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming

import benchmarks
import gtp_jax as gtp
from benchmarks.contenders.mistakes import MISTAKES
from gtp_jax.formats import MXFP8, NVFP4
from gtp_jax.runner.cli import main

SETTINGS = benchmarks.CurveSettings(preset="tiny", steps=200, batch=8, seq=64, seed=0, lr=1e-3, device="cpu")


def write_log(folder, name, losses, held_out, cut="", **changes):
    lines = [{"settings": dataclasses.asdict(dataclasses.replace(SETTINGS, **changes))}]
    lines += [{"step": i, "loss": loss} for i, loss in enumerate(losses, start=1)]
    lines += [{"step": len(losses), "held_out": held_out}, {"done": True, "step_s": 0.0125}]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)


def test_logs_become_a_table_of_gaps_and_a_picture(tmp_path, capsys):
    losses = np.linspace(5, 2, 200)
    write_log(tmp_path, "bf16", losses, 2.0)
    write_log(tmp_path, "nvfp4-matmuls", losses * 1.015, 2.03)
    write_log(tmp_path, "mxfp8", losses[:50], 2.0, cut='{"step": 51, "lo')  # ended early
    assert main(["bench", "recipes", "--draw", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line and line[0].islower()}
    assert rows["nvfp4-matmuls"].count("+1.50 %") == 2 and "2509.25149" in rows["nvfp4-matmuls"]
    assert "12.5" in rows["bf16"] and rows["mxfp8"].split()[1:5] == ["-"] * 4
    assert (tmp_path / "recipes.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_recipe_that_diverged_is_told_from_one_that_was_ended(bad, tmp_path, capsys):
    losses = np.linspace(5, 2, 200)
    write_log(tmp_path, "bf16", losses, 2.0)
    write_log(tmp_path, "mxfp8-rounded-down", np.where(np.arange(200) < 120, losses, bad), bad)
    assert main(["bench", "recipes", "--draw", "--out", str(tmp_path)]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mxfp8-rounded-down"))
    assert row.split()[1:3] == ["diverged", "-"] and row.split()[4] == "-"
    assert (tmp_path / "recipes.png").read_bytes()[1:4] == b"PNG"


def test_logs_of_different_settings_are_not_shown_together(tmp_path, capsys):
    losses = np.linspace(5, 2, 200)
    write_log(tmp_path, "bf16", losses, 2.0)
    write_log(tmp_path, "mxfp8", losses, 2.0, steps=300, data=("books",))
    assert main(["bench", "recipes", "--draw", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert re.search(naming("mxfp8.jsonl 300 (200 in bf16.jsonl) ('books',)"), message)
    (tmp_path / "mxfp8.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    assert main(["bench", "recipes", "--draw", "--out", str(tmp_path)]) == 2
    assert re.search(naming("mxfp8.jsonl settings Remove"), capsys.readouterr().err)


def test_nothing_is_trained_beside_logs_of_other_settings(tmp_path, capsys):
    write_log(tmp_path, "bf16", np.linspace(5, 2, 200), 2.0)
    before = (tmp_path / "bf16.jsonl").read_text()
    assert main(["bench", "recipes", "--recipes", "fp8", "--steps", "7", "--out", str(tmp_path)]) == 2
    assert re.search(naming("steps 7 200"), capsys.readouterr().err)
    assert (tmp_path / "bf16.jsonl").read_text() == before and not (tmp_path / "fp8.jsonl").exists()


def test_slices_of_one_amax_hide_the_missing_reduction_and_others_do_not():
    kernel = jax.random.normal(jax.random.key(0), (2, 64, 128))
    kernel = kernel.at[:, 0, ::32].set(9.0)  # the same largest element in all four shards
    wanted = gtp.ops.dequantize(gtp.ops.quantize(jnp.swapaxes(kernel, 1, 2), NVFP4, amax=jnp.full(2, 9.0)), jnp.float32)
    np.testing.assert_array_equal(MISTAKES["local amax"](kernel), jnp.swapaxes(wanted, 1, 2))
    found = MISTAKES["local amax"](kernel.at[:, 0, 64].set(18.0))
    assert abs(float(found[0, 0, 64]) - 9.0) < 1  # read at half its size


def test_scales_rounded_down_saturate_what_scales_rounded_up_hold():
    kernel = jnp.full((1, 32, 1), 1.0).at[0, 5, 0].set(1.95)
    up = gtp.ops.dequantize(gtp.ops.quantize(jnp.swapaxes(kernel, 1, 2), MXFP8), jnp.float32)
    assert float(up[0, 0, 5]) == 2.0
    assert float(MISTAKES["scales rounded down"](kernel)[0, 5, 0]) == 1.75


@pytest.mark.slow
def test_recipes_train_side_by_side_and_one_that_fails_says_why(tmp_path, capsys):
    short = ["--steps", "6", "--recipes", "nvfp4-matmuls", "mxfp8-rounded-down", "nvfp4-local-amax"]
    assert main(["bench", "recipes", *short, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "6 steps of 8 x 64 tokens" in printed and "did not finish" not in printed
    assert main(["bench", "recipes", "--steps", "6", "--recipes", "bf16-seed1", "--out", str(tmp_path)]) == 0
    assert "nvfp4-matmuls" in capsys.readouterr().out  # what was there is shown too
    names = ("bf16", "bf16-seed1", "nvfp4-matmuls", "mxfp8-rounded-down", "nvfp4-local-amax")
    first = set()
    for name in names:
        log = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        losses = {r["step"]: r["loss"] for r in log if "loss" in r}
        assert list(losses) == list(range(1, 7)) and log[-1]["done"]
        first.add(losses[1])
    assert len(first) == len(names)  # each computes with weights of its own
    too_long = ["--steps", "6", "--seq", "100000000", "--recipes", "bf16"]
    assert main(["bench", "recipes", *too_long, "--out", str(tmp_path / "long")]) == 1
    assert "bf16 (ValueError: too few tokens" in capsys.readouterr().out
