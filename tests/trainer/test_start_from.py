"""A run that starts from a checkpoint has its model: what is asked for otherwise is refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shutil

import jax
import jax.numpy as jnp
import pytest
import tokenizers
from convert.hugging_face import random_tensors, write_model
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import PRESETS, LlamaConfig, saved, saved_config
from gtp_jax.nn import Routing
from gtp_jax.ops import RopeScaling
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import from_settings
from gtp_jax.runner.trainer import TrainConfig, resolve
from gtp_jax.runner.trainer._corpus import read_corpus
from gtp_jax.runner.trainer._start import started_from

from .runs import WORDS, small, write_text

jax.devices()  # fixes the number of devices to what the suite runs with

DENSE = LlamaConfig(
    vocab_size=97, hidden_size=18, num_layers=3, num_heads=3, num_kv_heads=1, head_dim=10, intermediate_size=26
)
MOE = dataclasses.replace(DENSE, num_experts=6, top_k=3, shared_hidden=12)
MODELS = {
    "dense": DENSE,
    "tied": dataclasses.replace(DENSE, tie_embeddings=True, epsilon=1e-6, rope_theta=5e5, qk_norm=True),
    "qwen2": dataclasses.replace(DENSE, qkv_bias=True, window=5),
    "yarn": dataclasses.replace(
        DENSE, rope_scaling=RopeScaling(kind="yarn", factor=8.0, original_length=64, beta_fast=16.0, beta_slow=2.0)
    ),
    "gemma3": dataclasses.replace(
        DENSE,
        **dict(qk_norm=True, norm="zero_centered_rms", branch_norms=True, activation="gelu_tanh", scale_embedding=True),
        **dict(window=5, full_every=3, window_rope_theta=1e4, query_pre_attn_scalar=20),
    ),
    "experts": MOE,
    "gpt-oss": dataclasses.replace(
        MOE,
        **dict(shared_hidden=0, qkv_bias=True, out_bias=True, sinks=True, expert_biases=True),
        **dict(swiglu_limit=5.0, swiglu_alpha=1.5, window=5, full_every=2, rotary_dim=6),
    ),
    "deepseek": dataclasses.replace(
        MOE, routing=Routing(score="sigmoid", normalize=False, scale=2.5, num_groups=2, top_groups=2, bias_rate=0.1)
    ),
    **PRESETS,
}


def checkpoint(folder, extra):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, extra=extra)
    return str(folder)


def started(folder, extra, **settings):
    return from_settings(
        TrainConfig, started_from({"from_": checkpoint(folder, extra), "tokenizer": "bytes", **settings})
    )


@pytest.mark.parametrize("name", ["tied", "qwen2", "gemma3", "gpt-oss", "yarn", "deepseek", "tiny-moe"])
def test_no_preset_is_needed_for_any_model(tmp_path, name):
    model = MODELS[name]
    config = started(tmp_path, saved(model))
    assert config.preset is None and config.model(3, dtype="float32").architecture() == model.architecture()
    assert config.peak_lr == pytest.approx(0.003 * (128 / model.hidden_size) ** 0.5)
    config.save(tmp_path / "config.json")  # which a resumed run reads, whatever became of the checkpoint
    assert TrainConfig.load(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        ("dense", {"num_layers": 2}, "--num-layers 2 num_layers 3"),
        ("dense", {"vocab_size": 98, "qk_norm": True}, "--vocab-size 98 97 --qk-norm True False"),
        ("yarn", {"rope_scaling_attention_factor": 1.0}, "--rope-scaling-attention-factor 1.0 None"),
        ("dense", {"preset": "tiny"}, "--preset tiny hidden_size 128 18"),
        ("8b", {"preset": "8b-3.1"}, "--preset 8b-3.1 rope_scaling_kind llama3 none"),
    ],
)
def test_settings_that_contradict_it_are_refused_by_name(tmp_path, model, settings, named):
    with pytest.raises(ValueError, match=naming(f"contradict {named} Remove")):
        started(tmp_path, saved(MODELS[model]), **settings)


def test_settings_that_agree_with_it_or_say_how_it_is_trained_are_taken(tmp_path):
    model = dataclasses.replace(MODELS["deepseek"], vocab_size=300)
    config = started(
        tmp_path, saved(model), num_layers=3, top_k=3, router_bias_rate=0.2, aux_loss_coeff=0.5, transport="padded"
    )
    base = config.base
    assert isinstance(base, LlamaConfig) and base.architecture() == model.architecture()
    assert (base.routing.bias_rate, base.aux_loss_coeff, base.transport) == (0.2, 0.5, "padded")
    shutil.rmtree(tmp_path / "1")
    larger = dataclasses.replace(PRESETS["tiny"], vocab_size=384)  # as a tokenizer has made of the preset
    assert started(tmp_path, saved(larger), preset="tiny").base.vocab_size == 384


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "model Use"),
        ({"model": "tiny"}, "'tiny'"),
        ({"model": {**saved(MOE)["model"], "routing": {"future": 1}}}, "'future'"),
        ({"family": "GPT"}, "'GPT'"),
    ],
)
def test_a_checkpoint_that_does_not_name_its_model_or_describes_it_otherwise_is_refused(tmp_path, extra, message):
    with pytest.raises(ValueError, match=naming("step 1", message)):
        started(tmp_path, extra)


# An end-of-text token that `runner.data` does not know by name, as DeepSeek's models have one.
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "eos_token_id": 0,
    "head_dim": 10,
    "hidden_size": 18,
    "intermediate_size": 26,
    "max_position_embeddings": 256,
    "max_window_layers": 0,
    "num_attention_heads": 3,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "rope_theta": 10000.0,
    "sliding_window": 7,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "vocab_size": len(WORDS) + 2,
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A model of sizes that no preset has, imported with its tokenizer; and text."""
    root = tmp_path_factory.mktemp("model")
    write_model(root / "hf", random_tensors(CONFIG), CONFIG)
    ids = {word: i for i, word in enumerate([END, *WORDS, "?"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(root / "hf/tokenizer.json"))
    assert main(["convert", "import", str(root / "hf"), str(root / "imported")]) == 0
    write_text(root / "text")
    return root


@pytest.fixture(scope="module")
def run(imported, tmp_path_factory):
    """The directory of a run that was started with --from alone, and what was printed."""
    out, start = tmp_path_factory.mktemp("run") / "run", tmp_path_factory.mktemp("start") / "qwen"
    shutil.copytree(imported / "imported", start)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["train", f"--from={start}", *small(imported / "text", out, num_layers=None, steps=2, seq=16)]) == 0
    shutil.rmtree(start)
    return out, printed.getvalue()


@pytest.mark.full
def test_it_is_trained_with_its_tokenizer(run, imported):
    out, printed = run
    assert re.search(r"model   from qwen: [\d,]+ parameters, 1 layers", printed)
    assert "tokens (tokenizer.json)" in printed
    checkpoints = Checkpoints(out / "checkpoints", read_only=True)
    assert checkpoints.files()["tokenizer.json"] == (imported / "hf/tokenizer.json").read_bytes()
    assert saved_config(checkpoints.manifest()["extra"]).vocab_size == CONFIG["vocab_size"]


@pytest.mark.full
def test_the_run_goes_on_and_generates_and_is_exported_without_what_it_started_from(run, tmp_path, capsys):
    out = shutil.copytree(run[0], tmp_path / "run")
    assert main(["train", "--resume", f"--out={out}", "--steps=3", f"--from={json_of(out)['from_']}"]) == 0
    assert "resumed at step 2" in capsys.readouterr().out
    assert main(["generate", str(out), "--prompt", "def return", "--max-new-tokens=2", "--temperature=0"]) == 0
    assert capsys.readouterr().out.startswith("def return")
    assert main(["convert", "export", str(out), str(tmp_path / "hf"), "--dtype=float32"]) == 0
    assert json_of(tmp_path / "hf").items() >= CONFIG.items()


@pytest.mark.parametrize("given", [None, "hf/tokenizer.json"])
def test_its_end_of_text_separates_documents_whoever_names_the_tokenizer(imported, given):
    tokenizer = {} if given is None else {"tokenizer": str(imported / given)}
    settings = {"from_": str(imported / "imported"), "data": (str(imported / "text"),), **tokenizer}
    corpus = read_corpus(from_settings(TrainConfig, started_from(settings)))
    assert corpus.tokenizer.separator == 0 and (corpus.train[0].tokens == 0).sum() == len(corpus.train[0])


def test_reading_it_waits_for_no_other_process(imported, tmp_path, monkeypatch):
    def fail(_):
        raise AssertionError("a collective before the processes are connected")

    monkeypatch.setattr("gtp_jax.checkpoint._steps.of_all_processes", fail)
    settings = {"from_": str(imported / "imported"), "out": str(tmp_path / "run")}
    assert resolve(settings, resume=False, force=False)[0].sizes.num_heads == 3


def json_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())
