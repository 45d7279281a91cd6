"""`gtp-jax bench collectives`: what moves, how much of it, and against which bound."""

import re

import jax
import pytest
from messages import naming

import benchmarks
import gtp_jax as gtp
from gtp_jax.models import LlamaConfig
from gtp_jax.recipes import GRAD_WIRES, RECIPES
from gtp_jax.runner.cli import main

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16, intermediate_size=128
)
ELEMENTS = CONFIG.matmul_params() - 64 * 64


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [dict(gtp=2, tp=2), dict(gtp=4)])
def test_bytes_are_those_of_the_format_and_rates_come_from_this_run(degrees):
    ranks, tp = degrees["gtp"], degrees.get("tp", 1)
    each = {"bf16": 2.0, "nvfp4": 0.5 + 1 / 256}
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: ranks * tp])):
        links = benchmarks.measure_links(1.0)
        found = list(benchmarks.measure_movements(CONFIG, {name: RECIPES[name]() for name in each}, links))
    assert links.mebibytes == pytest.approx(1.0, rel=0.01)
    bf16, nvfp4, scatter, *exchanges = found
    share = ELEMENTS / tp * (ranks - 1) / ranks
    for movement, size in ((bf16, each["bf16"]), (nvfp4, each["nvfp4"]), (scatter, each["bf16"])):
        # scales of small weights are filled up to 16 bytes
        assert movement.wire_bytes == pytest.approx(size * share, rel=0.02 if movement is nvfp4 else 1e-9)
        rate = links.scatter_rate if movement is scatter else links.gather_rate
        assert movement.bound_s == pytest.approx(movement.wire_bytes / rate)
        assert movement.seconds > 0 and (movement.whole_s is None) == (movement is scatter)
    scales = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1 + 1 / 32}
    for movement, (name, size) in zip(exchanges, scales.items(), strict=True):
        assert movement.name == f"exchange gradient {name}"
        assert movement.wire_bytes == pytest.approx(size * share, rel=0.02)
    # gradients in bfloat16 lose nothing on the wire; codes of random numbers lose 3 %
    assert [m.error for m in exchanges] == [0, pytest.approx(0.027, rel=0.1), pytest.approx(0.027, rel=0.1)]


@pytest.mark.slow
def test_the_command_prints_every_format(capsys):
    assert main(["bench", "collectives", "--gtp", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(f"gather {name}" in printed for name in RECIPES) and "scatter gradient" in printed
    assert all(f"exchange gradient {name}" in printed for name in GRAD_WIRES)


def test_one_rank_is_refused(capsys):
    for degree, message in (("1", "two or more gtp"), ("64", "gtp 64 64 devices 8")):
        assert main(["bench", "collectives", "--gtp", degree]) == 2
        assert re.search(naming(message), capsys.readouterr().err)
