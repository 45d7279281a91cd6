"""`gtp-jax bench sequence`: what moves over tp around each matmul, and how much of it."""

import json
import re

import jax
import pytest
from messages import naming

import benchmarks
import gtp_jax as gtp
from gtp_jax.models import LlamaConfig
from gtp_jax.runner.cli import main

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=16, intermediate_size=128
)


def on_two(function):
    with jax.set_mesh(gtp.make_mesh(gtp=1, tp=2, devices=jax.devices()[:2])):
        return function()


@pytest.mark.slow
def test_shapes_are_those_of_a_rank_of_the_larger_degree_and_bytes_those_of_the_mesh():
    found = {m.name: m for m in on_two(lambda: list(benchmarks.measure_sequence(CONFIG, part=16, shares=4)))}
    outputs = {"attention.qkv": (64, (128 + 64 + 64) // 4), "attention.out": (128 // 4, 64)}
    outputs |= {"mlp.up": (64, 256 // 4), "mlp.down": (128 // 4, 64)}
    assert set(found) == {f"{name} {way}" for name in outputs for way in ("forward", "backward")}
    for name, (into, out) in outputs.items():
        forward, backward = found[f"{name} forward"], found[f"{name} backward"]
        assert forward.flops == 2 * 32 * into * out and backward.flops == 2 * forward.flops
        # one part of 16 tokens leaves, in bfloat16: of the whole features, 64
        assert forward.wire_bytes == 16 * 64 * 2
        # a column-parallel layer gathers its input again
        assert backward.wire_bytes == forward.wire_bytes * (2 if name in ("attention.qkv", "mlp.up") else 1)
        assert min(forward.alone_s, forward.parts_s, forward.at_once_s) > 0


@pytest.mark.slow
def test_the_command_prints_and_writes_what_it_measured(capsys, tmp_path):
    path = tmp_path / "s.json"
    assert main(["bench", "sequence", "--tp", "2", "--mebibytes", "0.25", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert [r["way"] for r in written["rates"]] == list(benchmarks.WAYS) and all(
        way in printed for way in benchmarks.WAYS
    )
    assert all(r["mebibytes"] == 0.25 and r["bytes_per_s"] > 0 for r in written["rates"])
    assert all(m["name"] in printed for m in written["matmuls"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--tp", "1"], "tp 1 two or more"),
        (["--tp", "64"], "64 devices 8"),
        (["--tp", "2", "--mebibytes", "0.25", "--shares", "7"], "`shares` 7"),
        (["--tp", "2", "--part", "0"], "at least 1"),
    ],
)
def test_bad_values_are_refused(flags, message, capsys):
    try:
        assert main(["bench", "sequence", *flags]) == 2
    except SystemExit as stopped:
        assert stopped.code == 2
    assert re.search(naming(message), capsys.readouterr().err)
