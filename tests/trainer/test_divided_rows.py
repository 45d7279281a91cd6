"""`gtp-jax train --cp N`: rows that the ranks cannot divide are padded, and a loss with too many logits has chunks."""

from __future__ import annotations

import re
import shlex

import jax
import pytest
from messages import naming

from gtp_jax.mesh import DeviceMemory
from gtp_jax.runner.cli import main

from .runs import losses, small

jax.devices()  # fixes the number of devices to what the suite runs with


@pytest.mark.full
@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_padded_rows_train_as_whole_rows_do(packing, text, tmp_path, capsys, x64):
    found = []
    for degrees in ({"gtp": 8, "tp": 1}, {"gtp": 2, "cp": 2, "tp": 2}):
        out = tmp_path / f"{len(degrees)}"
        flags = small(text, out, seq=31, steps=2, eval_every=2, dtype="float64", packing=packing, **degrees)
        flags += ["--sample-tokens=8"] if "cp" in degrees else []  # which no mesh with cp writes
        assert main(["train", *flags]) == 0
        found.append(losses(out))
    printed = capsys.readouterr().out
    assert printed.count("rows of 31 tokens to 32, which cp x tp divides") == 1
    assert printed.count("samples none") == 1
    assert len(found[0]) >= 3 and found[0] == pytest.approx(found[1], rel=1e-12, abs=0)


@pytest.mark.full
def test_a_run_with_too_many_logits_says_that_its_loss_has_chunks(text, tmp_path, capsys, monkeypatch):
    memory = DeviceMemory(limit=1 << 18, free=1 << 18)
    monkeypatch.setattr("gtp_jax.runner.trainer._family.device_memory", lambda: memory)
    assert main(["train", *small(text, tmp_path / "run", steps=1, eval_every=0)]) == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("loss ")]
    assert re.search(naming("4096 65.5 kB 1/8 262 kB --loss-chunk 0"), line)
    (command,) = [line for line in printed.splitlines() if "gtp-jax inspect" in line]
    assert "--loss-chunk 4096" in shlex.join(shlex.split(command))
