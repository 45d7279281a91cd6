"""What `gtp-jax inspect` refuses, before anything is compiled."""

from __future__ import annotations

import argparse
import re

import jax
import pytest
from messages import naming
from selection import others_full

from gtp_jax.inspect import InspectOptions, inspect
from gtp_jax.runner.cli._inspect import add_parser
from gtp_jax.runner.flags import Parallelism

jax.devices()  # fixes the number of devices to what the suite runs with


def run(*arguments: str) -> int:
    args = add_parser(argparse.ArgumentParser).parse_args(arguments)
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


def test_words_where_numbers_belong_are_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        run("--unroll", "most")
    assert re.search(naming("'most' 'full'"), capsys.readouterr().err)


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
