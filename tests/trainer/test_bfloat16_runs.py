"""Every kind of run in bfloat16, the default of GPUs; on CPUs, runs compute in float32 unless told otherwise."""

import math
import shutil

import pytest

from gtp_jax.runner.cli import main

from .runs import losses, small

KINDS = {
    "dense": ["--gtp=4", "--tp=2"],
    "microbatches": ["--dp=2", "--gtp=2", "--tp=2", "--microbatches=2"],
    "mixture": ["--preset=tiny-moe", "--gtp=4", "--ep=2"],
    "NVFP4 on the wire": ["--gtp=8", "--recipe=nvfp4"],
    "FP8 matmuls": ["--gtp=8", "--recipe=fp8-matmuls"],
    "changing recipes": ["--gtp=8", "--recipe=nvfp4-matmuls", "--recipe-from", "3=fp8-matmuls", "7=bf16"],
    "Muon": ["--gtp=8", "--optimizer=muon"],
    "unequal replicas": ["--dp=2", "--gtp=2", "--tp=2", "--failed-devices=7"],
    "offload": ["--gtp=8", "--remat=offload-matmuls"],
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_is_resumed_bit_for_bit_and_generates(text, tmp_path, capsys, kind):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["train", *small(text, whole, lr=0.02, warmup=0, dtype="bfloat16"), *KINDS[kind]]) == 0
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / "8")
    assert main(["train", f"--out={cut}", "--resume"]) == 0
    found = losses(whole)
    assert losses(cut) == found and all(map(math.isfinite, found.values()))
    assert found[8, "held_out"] < found[0, "held_out"] - 0.5
    capsys.readouterr()
    assert main(["generate", str(whole), "--prompt=def", "--max-new-tokens=4", "--temperature=0"]) == 0
    assert capsys.readouterr().out.startswith("def")


@pytest.mark.full
def test_adapters_on_a_run_learn(text, tmp_path):
    run, adapted = tmp_path / "run", tmp_path / "adapted"
    for out, flags in ((run, ()), (adapted, (f"--from={run}", "--lora=2", "--recipe=nvfp4"))):
        sizes = {} if out == run else {"num_layers": None}
        assert main(["train", *small(text, out, lr=0.02, warmup=0, dtype="bfloat16", **sizes), *flags]) == 0
    found = losses(adapted)
    assert found[8, "held_out"] < found[0, "held_out"] < losses(run)[0, "held_out"]
