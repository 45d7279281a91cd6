"""Tunix's own tools on sharded models: `Sampler` generates the same tokens, `PeftTrainer` makes the same updates."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

pytest.importorskip(
    "tunix", reason="google-tunix is not installed; tests/elsewhere/environment.sh makes an environment that has it"
)

import qwix  # noqa: E402
from tunix.generate.sampler import CacheConfig, Sampler  # noqa: E402
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig  # noqa: E402

import gtp_jax as gtp  # noqa: E402

from .families import (  # noqa: E402
    HEAD,
    KV_HEADS,
    MESHES,
    OPTIONS,
    VOCAB,
    batch,
    difference,
    in_scope,
    load,
    mesh_of,
)

SCOPES = [("gtp 8", "set_mesh"), ("gtp 4 x tp 2", "with mesh")]
PROMPTS = ["sharded", "by", "one line", "of code", "and the", "same", "tokens", "come"]
PROJECTIONS = ".*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|q_einsum|kv_einsum|attn_vec_einsum)"


class Characters:
    """A tokenizer: a token is a character."""

    def encode(self, text):
        return [3 + ord(letter) % (VOCAB - 3) for letter in text]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


def generated(model, **options):
    """Returns the tokens that Tunix's sampler generates, row by row."""
    sampler = Sampler(model, Characters(), CacheConfig(64, model.config.num_layers, KV_HEADS, HEAD))
    return [np.asarray(row).tolist() for row in sampler(PROMPTS, max_generation_steps=16, **options).tokens]


def updated(model):
    """Returns all parameters after three steps of Tunix's trainer, and the model."""
    optimizer = optax.adamw(1e-2, eps=1e-3)
    PeftTrainer(model, optimizer, TrainingConfig(eval_every_n_steps=100, max_steps=3)).train([batch()] * 3)
    return {jax.tree_util.keystr(p): np.asarray(v) for p, v in jax.tree_util.tree_leaves_with_path(nnx.state(model))}


def adapted(model):
    """Returns the model with adapters of rank 4 on every projection."""
    provider = qwix.LoraProvider(module_path=PROJECTIONS, rank=4, alpha=8.0)
    rows = batch()
    call = (rows["input_tokens"], rows["positions"], None, rows["attention_mask"])
    return qwix.apply_lora_to_model(model, provider, *call, rngs=nnx.Rngs(7))


@pytest.fixture(autouse=True)
def no_progress_bar(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.mark.parametrize("mesh, how", SCOPES)
def test_the_sampler_generates_the_same_tokens(checkpoint, mesh, how):
    family, folder = checkpoint
    drawn = dict(temperature=1.0, top_p=0.9, seed=3)
    wanted = [generated(load(family, folder), **options) for options in ({}, drawn)]
    devices = mesh_of(*MESHES[mesh])
    model = load(family, folder, devices)
    with in_scope(devices, how, family):
        model = gtp.shard(model, **OPTIONS)
        assert [generated(model, **options) for options in ({}, drawn)] == wanted
    assert wanted[0] != wanted[1] and len({tuple(row) for rows in wanted for row in rows}) > 8


@pytest.mark.parametrize("mesh, how", SCOPES)
def test_the_trainer_makes_the_same_updates(checkpoint, mesh, how):
    family, folder = checkpoint
    wanted = updated(load(family, folder))
    devices = mesh_of(*MESHES[mesh])
    model = load(family, folder, devices)
    with in_scope(devices, how, family):
        found = difference(updated(gtp.shard(model, **OPTIONS)), wanted)
    print(f"{family.name}, {mesh}, {how}: PeftTrainer {found:.1e}")
    assert found < 1e-5


@pytest.mark.parametrize("mesh, how", SCOPES)
def test_adapters_have_the_same_updates(checkpoint, mesh, how):
    family, folder = checkpoint
    start = nnx.state(adapted(load(family, folder)))
    wanted = updated(adapted(load(family, folder)))
    devices = mesh_of(*MESHES[mesh])
    model = load(family, folder, devices)
    with in_scope(devices, how, family):
        found = updated(gtp.shard(adapted(model), **OPTIONS))
    print(f"{family.name}, {mesh}, {how}: LoRA {difference(found, wanted):.1e}")
    assert difference(found, wanted) < 1e-4
    for path, before in jax.tree_util.tree_leaves_with_path(start):
        name = jax.tree_util.keystr(path)
        assert np.array_equal(found[name], before) != ("lora" in name), name
