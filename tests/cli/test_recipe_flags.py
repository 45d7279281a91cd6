"""Recipes on the command line: the flags say what the fields of a recipe say, in every command that takes them."""

from __future__ import annotations

import argparse
import shutil

import jax
import pytest
from trainer.runs import read_records, refused, small, write_text

import gtp_jax as gtp
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import Quantization, add_flags, from_settings, given

jax.devices()  # fixes the number of devices to what the suite runs with

FLAGS = {
    "": gtp.recipes.BF16(),
    "--recipe nvfp4-matmuls --high-precision-last 2": gtp.NVFP4(matmuls=True, high_precision_last=2),
    "--recipe mxfp8 --high-precision-first 1 --grad-wire fp8": gtp.MXFP8(high_precision_first=1, grad_wire="fp8"),
    "--override mlp.down=mxfp8-matmuls attention=bf16 --recipe nvfp4": gtp.NVFP4(
        override={"mlp.down": gtp.MXFP8(matmuls=True), "attention": gtp.recipes.BF16()}
    ),
    "--override mlp.down=fp8 --recipe nvfp4 --override attention=bf16": gtp.NVFP4(
        override={"mlp.down": gtp.FP8(), "attention": gtp.recipes.BF16()}
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


OF_PHASES = {
    "--recipe-from 2=fp6": "`recipe_from` '2=fp6' STEP=RECIPE 9000=bf16 fp8-matmuls",
    "--recipe-from 2": "`recipe_from` '2' STEP=RECIPE",
    "--recipe-from 4=bf16 2=fp8": "`recipe_from` 4, 2 after `recipe`",
    "--recipe-from 0=bf16": "`recipe_from` 0 after `recipe`",
    "--recipe-from 8=bf16": "`recipe_from` '8=bf16' `steps` 8 earlier",
    "--recipe-from 2=fp8-delayed": "`recipe_from` FP8Delayed amaxes",
    "--recipe nvfp4 --recipe-from 2=fp8 --override mlp.dwn=fp8": "'mlp.dwn'",
    "--recipe-from 2=bf16 --dp=2 --gtp=2 --tp=2 --failed-devices=7": "`recipe_from` replicas --recipe-from failures",
}


@pytest.mark.parametrize("words", OF_PHASES)
def test_recipes_that_cannot_follow_each_other_are_refused_before_anything_is_made(words, text, tmp_path, capsys):
    refused(capsys, OF_PHASES[words], "train", *small(text, tmp_path / "run", num_layers=None), *words.split())
    assert not (tmp_path / "run").exists()


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
