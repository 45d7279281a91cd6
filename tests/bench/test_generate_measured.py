"""`gtp-jax bench generate`: the time of a token, and what the token must read."""

import json
import re

import numpy as np
import pytest
from messages import naming

import benchmarks
import gtp_jax as gtp
from benchmarks import _generate
from gtp_jax.generation import STEPS
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli import main

SMALL = ["--num-layers", "1", "--prompt", "8"]


def test_the_command_prints_and_writes_what_it_measured(capsys, tmp_path):
    path = tmp_path / "g.json"
    assert main(["bench", "generate", *SMALL, "--tokens", "40", "--json", str(path)]) == 0
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    assert f"{1e3 * written['seconds']:.3f} ms, the median of 2 calls" in printed
    assert 0 < written["low_s"] <= written["seconds"] <= written["high_s"]
    assert (written["preset"], written["num_layers"], written["prompt"], written["tokens"]) == ("tiny", 1, 8, 40)
    # a layer has q, k, v, o and gate, up, down; the head has a column for each of 256 tokens
    matrices = 128 * 32 * (2 * 8 + 2 * 4) + 3 * 128 * 384 + 256 * 128
    assert written["weight_bytes"] == 2 * matrices
    # keys and values of 4 heads: the prompt, the first token, and half of the 32 that were timed
    assert written["cache_bytes"] == 2 * 2 * 4 * 32 * (8 + 1 + 16)
    assert "time / reading" not in printed and written["ratio"] is None  # of a CPU's memory no rate is known


def test_only_whole_calls_of_the_second_time_count(monkeypatch):
    now, delays = [0.0], iter([[9.0] * 4, [7.0, 1.6, 3.2, 8.0]])  # compilation; then prompt, two calls, a part

    def stream(model, row, *, max_new_tokens):
        for delay, count in zip(next(delays), (1, STEPS, STEPS, 4), strict=True):
            now[0] += delay
            yield np.zeros((1, count), np.int32)

    monkeypatch.setattr(_generate.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(gtp, "generate_stream", stream)
    monkeypatch.setattr(gtp, "init", lambda factory, rngs: None)
    found = benchmarks.measure_generate(PRESETS["tiny"], prompt=8, tokens=37)
    assert (found.calls, found.low_s, found.high_s) == (2, pytest.approx(0.1), pytest.approx(0.2))
    assert found.seconds == pytest.approx(0.15)
    assert found.over_reading(1e9) == pytest.approx(0.15e9 / (found.weight_bytes + found.cache_bytes))


def test_the_ratio_is_printed_where_the_memorys_rate_is_known(capsys, monkeypatch):
    found = benchmarks.Decode(1e-3, 1e-3, 1e-3, 15, weight_bytes=2_000_000_000, cache_bytes=10_000_000)
    monkeypatch.setattr(benchmarks, "measure_generate", lambda config, **_: found)
    for rate, line in ((3.35e12, "1.67, goal at most 2: reached"), (4.8e12, "2.39, goal at most 2: MISSED")):
        monkeypatch.setattr(benchmarks, "memory_rate", lambda kind, rate=rate: rate)
        assert main(["bench", "generate"]) == 0
        assert f"time / reading   {line}" in capsys.readouterr().out


def test_rates_are_those_of_the_chip_that_a_device_names():
    known = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}
    others = ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB", "cpu"]
    for kind, rate in {**known, **dict.fromkeys(others)}.items():
        assert benchmarks.memory_rate(kind) == rate


@pytest.mark.parametrize(
    "flags, message", [(["--tokens", "16"], "`tokens` 16 more"), (["--prompt", "0"], "at least 1")]
)
def test_bad_values_are_refused(flags, message, capsys):
    try:
        assert main(["bench", "generate", *flags]) == 2
    except SystemExit as stopped:
        assert stopped.code == 2
    assert re.search(naming(message), capsys.readouterr().err)
