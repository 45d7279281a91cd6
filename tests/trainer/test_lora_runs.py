"""`gtp-jax train --lora` on an import: it resumes, generates, merges, and is exported for PEFT."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from convert.hugging_face import CONFIG, QWEN2, random_tensors, write_model
from convert.test_quantized_import import fp8
from messages import naming

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import import_llama
from gtp_jax.models import load
from gtp_jax.runner.cli import main

from .runs import losses, refused, small, write_text

jax.devices()  # fixes the number of devices to what the suite runs with

HF = {**CONFIG, "vocab_size": 256, "num_hidden_layers": 2, "_name_or_path": "someone/tiny"}
GREEDY = ["--max-new-tokens=4", "--temperature=0"]
LORA = ["--lora=3", "--lora-dropout=0.2", "--tokenizer=bytes", "--lr=0.01", "--warmup=0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A text, an import, and a run of 4 steps on gtp 4 x tp 2."""
    folder = tmp_path_factory.mktemp("lora")
    text = write_text(folder / "text", documents=8)
    write_model(folder / "hf", {name: x * 0.1 for name, x in random_tensors(HF).items()}, HF)
    import_llama(folder / "hf", folder / "imported")
    flags = [
        *small(text, folder / "run", steps=4, save_every=2, eval_every=0, gtp=4, tp=2),
        f"--from={folder / 'imported'}",
        *LORA,
    ]
    assert main(["train", *flags]) == 0
    return folder


@pytest.mark.full
def test_only_adapters_are_trained_and_the_report_says_how_many(made):
    report = (made / "run/report.txt").read_text()
    rank, layers, wide, query, key, hidden = 3, 2, 64, 128, 64, 160
    each = [(wide, query), (wide, key), (wide, key), (query, wide), (wide, hidden), (wide, hidden), (hidden, wide)]
    count = layers * rank * sum(i + o for i, o in each)
    assert f"{count:,} parameters, of adapters of rank 3, alpha 6; the rest is frozen" in report
    leaves = Checkpoints(made / "run/checkpoints", read_only=True).manifest()["leaves"]
    assert sum(int(np.prod(leaf["shape"])) for name, leaf in leaves.items() if name.startswith("params/")) == count
    imported = Checkpoints(made / "imported", read_only=True).manifest()["leaves"]
    for name, leaf in imported.items():  # nothing has changed the base
        assert leaves[name.replace("params/", "frozen/", 1)]["digest"] == leaf["digest"]


@pytest.mark.full
def test_it_generates_and_merged_weights_have_its_logits(made, tmp_path, capsys):
    run, merged = made / "run", tmp_path / "merged"
    assert main(["generate", str(run), "--prompt", "def ", *GREEDY]) == 0
    text = capsys.readouterr().out
    assert text.startswith("def ")
    assert main(["convert", "merge", str(run), str(merged)]) == 0
    said = capsys.readouterr().out
    assert re.search(naming("step 4 7 kernels float32"), said)
    assert main(["generate", str(merged), "--prompt", "def ", *GREEDY]) == 0
    assert capsys.readouterr().out == text
    tokens = np.arange(12).reshape(1, 12)
    with jax.set_mesh(gtp.make_mesh(tp=2, devices=jax.devices()[:2])):
        found, wanted, base = (
            np.asarray(jax.jit(lambda model: model(tokens))(load(one, dtype="float32")))
            for one in (merged, run, made / "imported")
        )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    assert np.abs(base - wanted).max() > 1e-2 * np.abs(wanted).max()


def test_peft_finds_its_names_and_shapes(made, tmp_path, capsys):
    assert main(["convert", "export", "--peft", str(made / "run"), str(tmp_path / "peft")]) == 0
    assert re.search(naming("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"), capsys.readouterr().out)
    config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert {**config, **dict(r=3, lora_alpha=6, lora_dropout=0.2, peft_type="LORA", bias="none")} == config
    assert config["base_model_name_or_path"] == "someone/tiny" and len(config["target_modules"]) == 7
    tensors = safetensors.numpy.load_file(tmp_path / "peft/adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2
    layer = "base_model.model.model.layers.1"
    assert tensors[f"{layer}.self_attn.q_proj.lora_A.weight"].shape == (3, 64)
    assert tensors[f"{layer}.self_attn.q_proj.lora_B.weight"].shape == (128, 3)
    assert tensors[f"{layer}.mlp.down_proj.lora_A.weight"].shape == (3, 160)
    # what PEFT adds to a weight is what a merge has added
    assert main(["convert", "merge", str(made / "run"), str(tmp_path / "merged")]) == 0
    assert main(["convert", "export", str(tmp_path / "merged"), str(tmp_path / "hf"), "--dtype=float32"]) == 0
    after, before = (safetensors.numpy.load_file(path / "model.safetensors") for path in (tmp_path / "hf", made / "hf"))
    for name, value in before.items():
        kernel = name.removesuffix(".weight")
        a, b = (tensors.get(f"base_model.model.{kernel}.lora_{letter}.weight") for letter in "AB")
        added = 0 if a is None or b is None else 2 * b @ a
        np.testing.assert_allclose(after[name], np.asarray(value, np.float32) + added, rtol=0, atol=1e-6)


@pytest.mark.full
def test_a_base_of_published_codes_is_trained_over_resumed_generated_from_and_merged(made, tmp_path, capsys):
    tensors = {}
    for name, x in random_tensors(HF).items():
        parts = {"": x * np.float32(0.1)}
        if name.endswith("_proj.weight"):
            parts, _ = fp8(np.float64(0.1) * x, (128, 128), "weight_scale_inv")
        tensors |= {name.removesuffix("weight" if part else "") + part: array for part, array in parts.items()}
    published = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_model(tmp_path / "hf", tensors, {**HF, "quantization_config": published})
    assert main(["convert", "import", str(tmp_path / "hf"), str(tmp_path / "imported")]) == 0
    assert re.search(naming("7 arrays frozen fp8-blocks"), capsys.readouterr().out)
    run = tmp_path / "run"
    flags = small(made / "text", run, steps=2, eval_every=0, save_every=1, dp=2, gtp=4)
    assert main(["train", *flags, f"--from={tmp_path / 'imported'}", "--recipe=fp8-blocks", *LORA]) == 0
    imported = Checkpoints(tmp_path / "imported", read_only=True).manifest()["leaves"]
    trained = Checkpoints(run / "checkpoints", read_only=True).manifest()["leaves"]
    codes = {name: leaf["digest"] for name, leaf in imported.items() if name.startswith("codes/")}
    assert len(codes) == 14
    assert codes == {name: trained[name.replace("codes/", "frozen/", 1)]["digest"] for name in codes}
    first = losses(run)
    assert main(["train", "--resume", "--step=1", f"--out={run}"]) == 0
    assert losses(run) == first
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "def ", *GREEDY]) == 0
    text = capsys.readouterr().out
    assert main(["convert", "merge", str(run), str(tmp_path / "merged")]) == 0
    assert re.search(naming("7 kernels FP8_BLOCKS codes"), capsys.readouterr().out)
    assert main(["generate", str(tmp_path / "merged"), "--prompt", "def ", *GREEDY]) == 0
    assert capsys.readouterr().out == text
    coded = ["--recipe=fp8-blocks", "--tp=1", "--tokenizer=bytes"]  # tp 2 would cut tiles; imports do not name tokens
    assert main(["generate", str(tmp_path / "imported"), *coded, "--prompt", "def ", *GREEDY]) == 0


@pytest.mark.full
@pytest.mark.parametrize("way", ["--average=0.5", "--optimizer=schedule-free"])
def test_averages_of_adapters_are_what_is_read_merged_and_exported(way, made, tmp_path):
    """Beside layers with biases, which are frozen: a Qwen2."""
    hf = {**QWEN2, "vocab_size": 256, "num_hidden_layers": 2}
    tensors = {name: x * 0.1 for name, x in random_tensors(hf).items()}
    write_model(tmp_path / "hf", tensors, hf)
    import_llama(tmp_path / "hf", tmp_path / "imported")
    run = tmp_path / "run"
    flags = small(made / "text", run, steps=4, save_every=4, sample_tokens=4, gtp=4, tp=2)
    assert main(["train", *flags, f"--from={tmp_path / 'imported'}", "--lora-targets", "query", way, *LORA]) == 0
    arrays = Checkpoints(run / "checkpoints", read_only=True).arrays()
    of = {name: array.read(0, array.shape[0]) for name, array in arrays.items() if "/query/" in name}
    wanted = {}
    for letter in "ab":
        (trained,) = (x for name, x in of.items() if name.startswith("params/") and name.endswith(f"query/{letter}"))
        kind = "average" if "average" in way else "z"
        (beside,) = (x for name, x in of.items() if f"/{kind}/" in name and name.endswith(f"query/{letter}"))
        wanted[letter] = beside if kind == "average" else (trained - (1 - 0.9) * beside) / 0.9
        assert np.abs(wanted[letter] - trained).max() > 1e-5
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])):
        model: Any = load(run, dtype="float32")
        adapter = model.blocks.layers.attention.qkv.lora["query"]
        for letter in "ab":
            found = np.asarray(getattr(adapter, letter).get_value())
            np.testing.assert_allclose(found, wanted[letter], rtol=0, atol=1e-7)
    assert main(["convert", "export", "--peft", str(run), str(tmp_path / "peft")]) == 0
    peft = safetensors.numpy.load_file(tmp_path / "peft/adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    np.testing.assert_allclose(peft[f"base_model.model.{name}.lora_A.weight"], wanted["a"][1].T, rtol=0, atol=1e-7)
    assert main(["convert", "merge", str(run), str(tmp_path / "merged")]) == 0
    assert main(["convert", "export", str(tmp_path / "merged"), str(tmp_path / "out"), "--dtype=float32"]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen2"
    merged = safetensors.numpy.load_file(tmp_path / "out/model.safetensors")
    added = 2 * (wanted["a"][1] @ wanted["b"][1]).T
    before = np.asarray(tensors[f"{name}.weight"], np.float32)
    np.testing.assert_allclose(merged[f"{name}.weight"], before + added, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(merged[f"{name}.bias"], np.asarray(tensors[f"{name}.bias"], np.float32))


def test_mistakes_are_named(made, tmp_path, capsys):
    run, imported, out = made / "run", made / "imported", str(tmp_path / "x")
    new = ["train", *small(made / "text", tmp_path / "out"), "--tokenizer=bytes"]
    lora = [*new, f"--from={imported}", "--lora=2"]
    resumed = ["train", "--resume", f"--out={run}"]
    for words, message in (
        ([*new, "--lora=2"], "`lora` 2 trained model"),
        ([*lora, "--lora=0"], "`lora` 0 1"),
        ([*lora, "--lora-targets", "q"], "`lora_targets` 'q'"),
        ([*lora, "--grad-wire=mxfp8"], "`grad_wire` 'mxfp8'"),
        ([*lora, "--recipe=nvfp4-matmuls"], "`recipe` nvfp4-matmuls"),
        ([*new, f"--from={run}"], "adapters Merge"),
        ([*resumed, "--lora=4"], "rank 3 alpha 6 dropout 0.2"),
        ([*resumed, "--recipe=fp8"], "bf16 fp8 --recipe"),
        (["convert", "export", run, out], "adapters no model"),
        (["convert", "merge", imported, out], "no adapters"),
        (["generate", run, "--prompt=a", "--recipe=fp8", *GREEDY], "adapters trained"),
    ):
        refused(capsys, message, *words)
    assert not (tmp_path / "x").exists() and not (tmp_path / "out").exists()
