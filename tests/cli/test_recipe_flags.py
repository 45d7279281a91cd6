"""Recipes on the command line: the flags say what the fields of a recipe say, in every command that takes them."""

from __future__ import annotations

import argparse
import json
import re
import shutil

import jax
import pytest
from messages import naming
from trainer.runs import read_records, refused, small, train, write_text

import benchmarks
import gtp_jax as gtp
from benchmarks.contenders.workload import COMMAND_BUFFERS
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import Quantization, add_flags, from_settings, given
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.train import accepts

jax.devices()  # fixes the number of devices to what the suite runs with

FLAGS = {
    "": gtp.BF16(),
    "--recipe nvfp4-matmuls --high-precision-last 2": gtp.NVFP4(matmuls=True, high_precision_last=2),
    "--recipe mxfp8 --high-precision-first 1 --grad-wire fp8": gtp.MXFP8(high_precision_first=1, grad_wire="fp8"),
    "--override mlp.down=mxfp8-matmuls attention=bf16 --recipe nvfp4": gtp.NVFP4(
        override={"mlp.down": gtp.MXFP8(matmuls=True), "attention": gtp.BF16()}
    ),
    "--override mlp.down=fp8 --recipe nvfp4 --override attention=bf16": gtp.NVFP4(
        override={"mlp.down": gtp.FP8(), "attention": gtp.BF16()}
    ),
}


def parsed(words: list[str]) -> Quantization:
    parser = argparse.ArgumentParser()
    add_flags(parser, Quantization)
    return from_settings(Quantization, given(parser.parse_args(words), Quantization))


@pytest.mark.parametrize("words", FLAGS)
def test_flags_are_the_recipe_and_its_flags_are_the_same_again(words):
    options = parsed(words.split())
    assert options.to_recipe() == FLAGS[words]
    assert parsed(list(options.flags)) == options


def test_a_configuration_that_was_saved_has_its_recipe_again(tmp_path):
    config = TrainConfig(
        quantization=Quantization(
            recipe="nvfp4", override=("mlp.down=fp8",), high_precision_first=1, pregathered_layers="all"
        )
    )
    config.save(tmp_path / "config.json")
    assert TrainConfig.load(tmp_path / "config.json") == config
    assert config.changes(TrainConfig(quantization=Quantization(recipe="nvfp4", override=("mlp.down=fp8",)))) == [
        "high_precision_first from 0 to 1",
        "pregathered_layers from 0 to all",
    ]


BAD = {
    "--high-precision-last -1": "`high_precision_last` -1 0",
    "--pregathered-layers -1": "`pregathered_layers` -1 0 'all'",
    "--override mlp.down": "`override` 'mlp.down' PATTERN=RECIPE mlp.down=mxfp8-matmuls",
    "--override =fp8": "`override` '=fp8' PATTERN=RECIPE",
    "--override mlp.down=fp6": "'fp6' bf16 fp8 fp8-matmuls fp8-attention",
    "--override mlp=fp8 mlp=bf16": "pattern twice",
}
OF_A_MODEL = {
    "--high-precision-first 3 --high-precision-last 2": "5 layers blocks 4",
    "--recipe nvfp4 --override mlp.dwn=fp8": "'mlp.dwn'",
}


@pytest.mark.parametrize("words", [*BAD, *OF_A_MODEL])
def test_mistakes_are_refused_before_anything_is_made(words, text, tmp_path, capsys):
    message = {**BAD, **OF_A_MODEL}[words]
    refused(capsys, message, "inspect", "--seq", "32", *words.split())
    refused(capsys, message, "train", *small(text, tmp_path / "run", num_layers=None), *words.split())
    assert not (tmp_path / "run").exists()
    if words in BAD:
        refused(capsys, message, "bench", "step", "--contenders", "gtp_jax bf16", *words.split())


@pytest.mark.slow
def test_a_run_with_delayed_scaling_resumes_as_if_it_had_not_stopped(tmp_path, capsys):
    run, again = tmp_path / "run", tmp_path / "again"
    flags = small(write_text(tmp_path / "text", documents=8), run, steps=4, gtp=4, tp=2, recipe="fp8-delayed")
    assert main(["train", *flags]) == 0
    shutil.copytree(run, again)
    assert main(["train", "--resume", "--step=2", f"--out={again}"]) == 0
    assert read_records(again)[-2:] == read_records(run)[-2:]
    resumed = ["train", "--resume", "--step=2", "--recipe=fp8-matmuls", f"--out={again}"]
    refused(capsys, "attention.out/history checkpoint", *resumed)


@pytest.mark.slow
def test_inspect_shows_the_last_layers_in_high_precision_and_the_modules_overridden(capsys):
    words = "--recipe nvfp4-matmuls --high-precision-last 2 --override mlp.down=fp8-matmuls"
    assert main(["inspect", "--seq", "32", "--gtp", "2", "--json", *words.split()]) == 0
    wire = json.loads(capsys.readouterr().out)["wire"]
    found = {(fact["module"].split(".")[-1], fact["first"]): (fact["layers"], fact["wire"]) for fact in wire}
    assert found["up", 0] == (2, "NVFP4") and found["down", 0] == (2, "FP8_E4M3")
    assert found["up", 2] == found["down", 2] == (2, "bfloat16")


def test_what_is_said_of_recipes_goes_for_our_contenders_alone_and_bf16_has_no_codes_to_hold():
    options = Quantization(high_precision_last=2, pregathered_layers="all", grad_wire="mxfp8")
    chosen = benchmarks.with_recipe(benchmarks.chosen_contenders(["regather"]), options)
    flags = {one.name: one.flags for one in chosen}
    assert flags["gtp_jax nvfp4 regather"][2:] == (
        "--high-precision-last=2",
        "--grad-wire=mxfp8",
        "--pregathered-layers=all",
    )
    assert flags["gtp_jax bf16 regather"][2:] == ("--high-precision-last=2", "--grad-wire=mxfp8")
    assert flags["fsdp2 bf16 regather"] == ()
    assert benchmarks.with_recipe(benchmarks.CONTENDERS, Quantization()) == list(benchmarks.CONTENDERS)


@pytest.mark.parametrize(
    ("spread", "choices", "prefix", "default", "flag"),
    [
        (benchmarks.with_remat_policies, ["matmuls", "activations"], "", "matmuls", "remat"),
        (benchmarks.with_grad_reductions, ["float32", "bf16-wire", "bf16"], "grads ", "bf16", "grad-reduce"),
        (benchmarks.with_command_buffers, ["default", "off", "on"], "command buffers ", "default", "command-buffers"),
        (benchmarks.with_xla_options, ["gtp_jax", "default"], "options ", "gtp_jax", "xla-options"),
    ],
)
def test_options_are_contenders_of_ours_by_name_and_the_default_alone_changes_none(
    spread, choices, prefix, default, flag
):
    rivals = benchmarks.chosen_contenders(["gtp_jax bf16 regather", "fsdp2 bf16 regather"])
    found = spread(rivals, [*choices, choices[0]])
    names = [f"gtp_jax bf16 {prefix}{choice} regather" for choice in choices]
    assert [one.name for one in found] == [*names, "fsdp2 bf16 regather"]
    assert [one.flags[-1] for one in found[:-1]] == [f"--{flag}={choice}" for choice in choices]
    assert found[-1] == rivals[1]
    assert spread(benchmarks.CONTENDERS, [default]) == list(benchmarks.CONTENDERS)


def test_xla_knows_the_commands_of_command_buffers():
    assert all(accepts(*option) for options in COMMAND_BUFFERS.values() for option in options.items())
    assert not accepts("xla_gpu_enable_command_buffer", "FUSION,NO_SUCH_COMMAND")


def test_what_contenders_compile_is_in_no_cache_of_the_users(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    assert "JAX_COMPILATION_CACHE_DIR" not in benchmarks.environment_of(1)


@pytest.mark.slow
def test_a_run_is_told_its_recipe_and_goes_on_with_it(tmp_path):
    text, out = write_text(tmp_path / "text"), tmp_path / "run"
    words = ["--recipe=nvfp4-matmuls", "--high-precision-last=2", "--override", "mlp.down=bf16", "attention.out=fp8"]
    printed = train([*small(text, out, num_layers=None, steps=2), *words])
    assert "recipe  nvfp4-matmuls, last 2 layers in high precision, mlp.down=bf16, attention.out=fp8\n" in printed
    assert "resumed at step 2" in train([f"--out={out}", "--resume", "--steps=4"])
    assert "changed high_precision_last from 2 to 0" in train(
        [f"--out={out}", "--resume", "--steps=5", "--high-precision-last=0"]
    )


@pytest.mark.slow
def test_a_step_is_measured_with_codes_held_and_gradients_exchanged(tmp_path, capsys):
    saved, which = tmp_path / "run.json", ["--contenders", "gtp_jax bf16 regather", "gtp_jax nvfp4 regather"]
    sizes = "--num-layers 2 --seq 32 --steps 2 --gtp 2 --microbatches 2"
    flags = ["bench", "step", *sizes.split(), *which]
    asked = ["--pregathered-layers", "all", "--grad-wire", "bf16", "--override", "mlp.down=fp8"]
    assert main([*flags, *asked, "--json", str(saved)]) == 0
    assert re.search(
        naming("gtp_jax --override mlp.down=fp8 --grad-wire=bf16 --pregathered-layers=all"), capsys.readouterr().out
    )
    assert all("median_s" in row for row in json.loads(saved.read_text())["contenders"])
    refused(capsys, "same flags", *flags, "--compare", saved)
