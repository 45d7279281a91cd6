"""What `gtp-jax inspect` refuses, before anything is compiled."""

from __future__ import annotations

import argparse

import jax
import pytest

from gtp_jax.inspect import InspectOptions, inspect
from gtp_jax.runner.cli._inspect import add_parser
from gtp_jax.runner.flags import Parallelism

jax.devices()  # fixes the number of devices to what the suite runs with


def run(*arguments: str) -> int:
    args = add_parser(argparse.ArgumentParser).parse_args(arguments)
    return args.run(args)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "7b"], "unknown `preset` '7b'; the known presets are tiny, .*405b"),
        (["--dp", "0"], "`dp` is 0; it must be a whole number of at least 1"),
        (["--microbatches", "-2"], "`microbatches` is -2"),
        (["--tp", "3", "--gtp", "1"], "`seq` is 2048, which tp 3 does not divide; the sequence is sharded over tp"),
        (["--tp", "2", "--gtp", "2", "--seq", "33"], "`seq` is 33, which tp 2 does not divide"),
        (
            ["--gtp", "4", "--batch", "6"],
            "`batch` is 6, which is not divisible by dp \\* gtp .* = 1 \\* 4 \\* 1 = 4",
        ),
        (["--unroll", "0"], "`unroll` is 0"),
        (["--keep-gathered", "-1"], "`keep_gathered` is -1"),
        (["--target", "h200"], "`target` is 'h200'; expected CHIP:DEVICES"),
        (["--gtp", "1000"], "needs 1000 CPU devices, but jax already runs with .* Start a new process"),
        (["--network-rate", "50"], "`network_rate` is 50.0, but there is no target, .*: give `--target`"),
        (["--gpus-per-host", "4"], "`gpus_per_host` is 4, but there is no target, .*: give `--target`"),
        (["--target", "h200:8", "--network-rate", "0"], "`network_rate` is 0.0; it must be a number above 0"),
        (
            ["--target", "h200:8", "--gpus-per-host", "0"],
            "`gpus_per_host` is 0; it must be a whole number of at least 1",
        ),
        (["--target", "h200:8", "--gpus-per-host", "3"], "has 8 devices, which do not fill hosts of 3"),
        (["--png", "x.png"], "`--png` draws the schedule of a GPU program: give `--target`"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)


def test_words_where_numbers_belong_are_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        run("--unroll", "most")
    assert "'most' is neither a number nor 'full'" in capsys.readouterr().err


def test_degrees_that_do_not_fill_a_target_are_refused():
    from gtp_jax import hlo

    if hlo.missing_packages():
        pytest.skip(f"compiling for a GPU needs {', '.join(hlo.missing_packages())}")
    with pytest.raises(ValueError, match="dp 1 x gtp 4 x tp 1 = 4, but there are 8 devices"):
        inspect(InspectOptions(target="h200:8", parallelism=Parallelism(gtp=4)))


def test_platforms_without_cpu_devices_are_refused(monkeypatch):
    """As on a machine with a GPU, whose JAX may be told to run on nothing else."""
    monkeypatch.setattr("gtp_jax.inspect._inspection.has_gpu", lambda: True)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda")
    try:
        with pytest.raises(ValueError, match=r"`jax_platforms` is 'cuda', .* Set JAX_PLATFORMS=cuda,cpu before jax"):
            inspect(InspectOptions(parallelism=Parallelism(gtp=2)))
    finally:
        jax.config.update("jax_platforms", before)
