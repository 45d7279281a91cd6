"""What `gtp-jax inspect` finds and prints, for CPU devices, and what it refuses before anything is compiled."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import pytest
from messages import naming
from selection import others_full

from gtp_jax.inspect import Inspection, InspectOptions, inspect
from gtp_jax.inspect._report import as_json, as_text
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli._inspect import add_parser
from gtp_jax.runner.cli._parser import Parser
from gtp_jax.runner.flags import Execution, ExpertOptions, Parallelism, Quantization

jax.devices()  # fixes the number of devices to what the suite runs with


@pytest.fixture(scope="module")
def found() -> Inspection:
    before = len(jax.live_arrays())
    inspection = inspect(
        InspectOptions(parallelism=Parallelism(gtp=4, tp=2), execution=Execution(microbatches=2), seq=64, batch=8)
    )
    assert len(jax.live_arrays()) <= before, "the model was allocated"
    return inspection


def test_every_parameter_is_listed_with_its_logical_shape_and_the_bytes_of_its_shard(found):
    assert (
        sum(math.prod(p.logical_shape) for p in found.parameters) == found.param_count == PRESETS["tiny"].param_count()
    )
    (table,) = [p for p in found.parameters if p.path == "embed.table"]
    assert (table.logical_shape, table.partition) == ((256, 128), (("tp", "gtp"), None))
    assert table.bytes_per_device == 4 * 256 * 128 // 8
    assert found.memory.weights_bytes == sum(p.bytes_per_device for p in found.parameters)
    assert found.memory.optimizer_bytes == 2 * found.memory.weights_bytes + 4  # Adam's moments and its count
    assert found.memory.other_bytes == 2 * 2 * 64 * 4 + 4  # tokens and targets of two sequences, and the step


def test_every_weight_is_gathered_and_scattered_for_every_microbatch(found):
    """Matmul weights: 4 a layer of 4 (q, k and v are one), embedding and head."""
    sliced = [c for c in found.collectives if c.axes == ("gtp",) and c.kind != "all-reduce"]
    counts = {
        (kind, direction): sum(c.times for c in sliced if (c.kind, c.direction) == (kind, direction))
        for kind, direction in {(c.kind, c.direction) for c in sliced}
    }
    weights, microbatches = 4 * 4 + 2, 2
    assert counts["all-gather", "forward"] == weights * microbatches
    assert counts["reduce-scatter", "backward"] == weights * microbatches
    assert {c.dtype for c in sliced if c.kind == "all-gather"} == {"u16"}


def test_text_has_every_section(found):
    text = as_text(found)
    assert text.startswith("tiny: 1,049,728 parameters on 8 virtual CPU devices, dp 1 x gtp 4 x tp 2\n")
    assert "8 sequences of 64 tokens in 2 microbatch(es)" in text
    assert "embed.table" in text and "tp*gtp, -" in text
    assert "\nactivations" in text and "leave each device" in text
    assert "exposed" not in text  # the order on a CPU means nothing


def test_json_holds_the_same_numbers(found):
    data = json.loads(json.dumps(as_json(found)))
    assert data["mesh"] == {"dp": 1, "gtp": 4, "tp": 2} and data["batch"] == 8
    assert data["memory"]["peak_bytes"] == found.memory.peak_bytes
    assert sum(c["count"] for c in data["collectives"]) == sum(c.times for c in found.collectives)
    assert len(data["parameters"]) == len(found.parameters) and "order" not in data


@pytest.mark.slow
def test_command_makes_the_devices_that_the_degrees_need():
    """In a process of its own: 16 devices, whatever the machine has."""
    code = (
        "from gtp_jax.runner.cli._inspect import add_parser; from gtp_jax.runner.cli._parser import Parser; "
        "a = add_parser(Parser).parse_args(); raise SystemExit(a.run(a))"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")}
    degrees = ["--dp", "2", "--gtp", "8", "--seq", "32", "--unroll", "1", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *degrees], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["mesh"] == {"dp": 2, "gtp": 8, "tp": 1} and data["batch"] == 16
    gathers = [c for c in data["collectives"] if c["kind"] == "all-gather" and c["axes"] == ["gtp"]]
    assert sum(c["count"] for c in gathers if c["direction"] == "forward") == 4 * 4 + 2


_DEFAULT_STAYS = """
import jax
from jax._src import xla_bridge
from gtp_jax.inspect import InspectOptions, _inspection, inspect
from gtp_jax.runner.flags import Parallelism

# devices that JAX prefers to those of the platform cpu, as it does GPUs
xla_bridge.register_backend_factory("preferred", lambda: xla_bridge.make_cpu_client(), priority=500)
_inspection.has_gpu = lambda: True
found = inspect(InspectOptions(parallelism=Parallelism(gtp=4), seq=32))
assert found.memory.peak_bytes > 0
assert jax.numpy.ones(2).device.client is jax.devices()[0].client is jax.devices("preferred")[0].client
"""


@pytest.mark.slow
def test_devices_that_jax_prefers_to_cpus_stay_the_default():
    """In a process of its own, in which the inspection is the first use of JAX: training after it runs on them."""
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")}
    done = subprocess.run([sys.executable, "-c", _DEFAULT_STAYS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "chunks", "remat", "recipe"),
    [
        ("padded", 2, "matmuls", "bf16"),
        ("gather", 1, "everything", "bf16"),
        ("padded", 2, "matmuls", "fp8-matmuls"),
        ("gather", 2, "matmuls", "mxfp8-matmuls"),
    ],
)
def test_what_is_listed_of_an_exchange_is_what_the_program_sends(transport, chunks, remat, recipe):
    """Of these two the program's counts do not depend on the load."""
    found = inspect(
        InspectOptions(
            preset="tiny-moe",
            parallelism=Parallelism(gtp=1, ep=4, dp=2),
            experts=ExpertOptions(transport=transport, exchange_chunks=chunks),
            execution=Execution(remat=remat),
            quantization=Quantization(recipe=recipe),
            seq=64,
        )
    )
    layers = PRESETS["tiny-moe"].num_layers
    listed, counted = Counter(), Counter()
    (exchange,) = found.exchanges
    for one in exchange.traffic:
        listed[one.direction, one.kind, one.dtype] += layers * np.array([one.count, one.bytes])
    for one in found.collectives:
        # what is not differentiated is the norm of the gradients
        if one.axes == ("ep",) and "jvp" in one.op_name and (one.direction, one.kind, one.dtype) in listed:
            counted[one.direction, one.kind, one.dtype] += one.times * np.array([1, one.wire_bytes])
    assert {key: tuple(value) for key, value in listed.items()} == {key: tuple(v) for key, v in counted.items()}
    printed = as_text(found)
    for what in ("choices", "dispatch of tokens, again", "combine of gradients of tokens"):
        assert what in printed
    config = PRESETS["tiny-moe"]
    here = 4 * (exchange.tokens // chunks)
    assert exchange.worst_rows == here * min(config.top_k, config.num_experts // 4)
    assert here * config.top_k // 4 <= exchange.round_rows <= exchange.worst_rows
    assert exchange.arrived_bytes == here * config.hidden_size * 2
    assert f"{exchange.worst_rows:,}" in printed and f"{exchange.round_rows:,}" in printed
    assert ("shares, again" in printed) is (remat == "matmuls")
    assert "dispatch of tokens" in {one["what"] for one in as_json(found)["exchanges"][0]["traffic"]}


def run(*arguments: str) -> int:
    args = add_parser(Parser).parse_args(arguments)
    return args.run(args)


REFUSED = {
    "--preset 7b": "`preset` '7b' tiny 405b",
    "--dp 0": "`dp` 0 whole 1",
    "--microbatches -2": "`microbatches` -2",
    "--tp 3 --gtp 1": "`seq` 2048 tp 3",
    "--tp 2 --gtp 2 --seq 33": "`seq` 33 tp 2",
    "--gtp 4 --batch 6": "`batch` 6 dp gtp 1 * 4 * 1 = 4",
    "--unroll 0": "`unroll` 0",
    "--keep-gathered -1": "`keep_gathered` -1",
    "--target h200": "`target` 'h200' CHIP:DEVICES",
    "--gtp 1000": "1000 CPU process",
    "--network-rate 50": "`network_rate` 50.0 `--target`",
    "--gpus-per-host 4": "`gpus_per_host` 4 `--target`",
    "--target h200:8 --network-rate 0": "`network_rate` 0.0",
    "--target h200:8 --gpus-per-host 0": "`gpus_per_host` 0 whole 1",
    "--target h200:8 --gpus-per-host 3": "8 devices hosts 3",
    "--png x.png": "`--png` `--target`",
}
USUAL = ["--preset 7b", "--dp 0", "--tp 3 --gtp 1", "--gtp 4 --batch 6", "--gpus-per-host 4", "--png x.png"]


@pytest.mark.parametrize("arguments", others_full(REFUSED, USUAL))
def test_bad_arguments_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match=naming(REFUSED[arguments])):
        run(*arguments.split())


def test_degrees_that_do_not_fill_a_target_are_refused():
    from gtp_jax import hlo

    if hlo.missing_packages():
        pytest.skip(f"compiling for a GPU needs {', '.join(hlo.missing_packages())}")
    with pytest.raises(ValueError, match=naming("dp 1 gtp tp = 4 8 devices")):
        inspect(InspectOptions(target="h200:8", parallelism=Parallelism(gtp=4)))


def test_platforms_without_cpu_devices_are_refused(monkeypatch):
    """As on a machine with a GPU, whose JAX may be told to run on nothing else."""
    monkeypatch.setattr("gtp_jax.inspect._inspection.has_gpu", lambda: True)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda")
    try:
        with pytest.raises(ValueError, match=naming("`jax_platforms` 'cuda' JAX_PLATFORMS=cuda,cpu")):
            inspect(InspectOptions(parallelism=Parallelism(gtp=2)))
    finally:
        jax.config.update("jax_platforms", before)
