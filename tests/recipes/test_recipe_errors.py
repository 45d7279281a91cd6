"""What recipes refuse, and what they say of a model."""

import jax
import optax
import pytest

import gtp_jax as gtp
from gtp_jax.cli import main
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model

CONFIG = LlamaConfig(vocab=640, dim=128, layers=3, heads=4, kv_heads=2, head_dim=64, ffn=384)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: gtp.NVFP4(block=(8, 8)), ValueError, r"`block` is \(8, 8\); it is \(16, 16\) or \(1, 16\)"),
        (lambda: gtp.FP8(matmuls="all"), TypeError, "`matmuls` is 'all'; it is True or False"),
        (lambda: gtp.FP8(gradient="bf16"), ValueError, "`gradient` is 'bf16'; it is one of 'e5m2', 'e4m3'"),
        (lambda: gtp.MXFP8(keep="head"), TypeError, r"`keep` is 'head'; it is a tuple of names"),
        (
            lambda: gtp.train_step(next_token_loss, optax.sgd(1.0), recipe="nvfp4"),
            TypeError,
            r"`recipe` is 'nvfp4'; it is one of gtp_jax.BF16\(\), gtp_jax.FP8\(\)",
        ),
        (lambda: gtp.eval_step(next_token_loss, recipe=gtp.NVFP4), TypeError, "Write it with parentheses"),
        (lambda: gtp.explain(None, gtp.FP8), TypeError, "Write it with parentheses"),
    ],
)
def test_bad_recipes_are_refused_when_they_are_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_explain_names_every_weight_its_format_and_its_bytes():
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        model = abstract_model(lambda rngs: Llama(CONFIG, rngs=rngs))
        found = gtp.explain(model, gtp.NVFP4(keep=("embed", "head", "out")))
    facts = {fact.module: fact for fact in found.facts}
    assert {name: fact.wire for name, fact in facts.items()} == {
        "embed": "bfloat16",
        "blocks.layers.attention.qkv": "NVFP4",
        "blocks.layers.attention.out": "bfloat16",
        "blocks.layers.mlp.up": "NVFP4",
        "blocks.layers.mlp.down": "NVFP4",
        "head": "bfloat16",
    }
    assert facts["embed"].bytes_per_element == 2.0
    up = facts["blocks.layers.mlp.up"]
    assert up.layers == 3 and up.shapes == ((128, 384), (128, 384))
    assert up.bytes == 8 * 2 * (48 * 64 + 3 * 8 + 8)  # slices, kernels, 48 x 128 codes of half a byte, 3 x 8 scales
    assert up.matmul == "bfloat16, of dequantized weights"
    assert "blocks.layers.mlp.up" in str(found) and "NVFP4" in str(found)


def test_inspect_shows_how_weights_travel(capsys):
    assert main(["inspect", "--preset", "tiny", "--seq", "64", "--recipe", "mxfp8"]) == 0
    printed = capsys.readouterr().out
    assert "how weights travel, recipe mxfp8" in printed and "MXFP8" in printed and " u8 " in printed


def test_explain_says_which_matmuls_run_in_fp8():
    model = abstract_model(lambda rngs: Llama(CONFIG, rngs=rngs))
    matmuls = {fact.module: fact.matmul for fact in gtp.explain(model, gtp.FP8(matmuls=True)).facts}
    assert matmuls.pop("embed") == matmuls.pop("head") == "bfloat16"
    assert set(matmuls.values()) == {"FP8_E4M3, gradients FP8_E5M2"}
