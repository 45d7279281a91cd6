"""transformers and gtp_jax compute the same of the same files, whichever of them has written these.

Run with `-rP`, these tests print the differences.
"""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

_REASON = "not installed; tests/interop/environment.sh makes an environment that has it"
transformers = pytest.importorskip("transformers", reason=f"transformers is {_REASON}")
pytest.importorskip("torch", reason=f"torch is {_REASON}")

import tokenizers  # noqa: E402

import gtp_jax as gtp  # noqa: E402
from gtp_jax.checkpoint import Checkpoints  # noqa: E402
from gtp_jax.convert import export_llama, import_llama  # noqa: E402
from gtp_jax.models import Llama, load, saved, saved_config  # noqa: E402

from .models import MODELS, greedy, logits, random_model, read_model  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, 101, (8, 48))
PROMPTS = [[5, 3, 8, 1, 90, 17, 2, 44, 63, 9, 11], [7, 7], [1]]


@pytest.fixture(scope="module", params=MODELS)
def written(request, tmp_path_factory):
    """A model of transformers, its folder, and the checkpoint that was imported from it."""
    folder = tmp_path_factory.mktemp("written")
    model = random_model(request.param)
    model.save_pretrained(folder / "hf")
    import_llama(folder / "hf", folder / "imported")
    return model, folder / "hf", folder / "imported"


def ours(checkpoint, **degrees):
    """What gtp_jax computes of the tokens on a mesh."""
    mesh = gtp.make_mesh(**degrees)
    with jax.set_mesh(mesh):
        placed = jax.device_put(TOKENS.astype(np.int32), NamedSharding(mesh, P(("dp", "gtp"))))
        return np.asarray(nnx.jit(lambda model, x: model(x))(load(checkpoint, dtype="float32"), placed))


def assert_close(found, wanted):
    """Equal to 1e-5 of the largest."""
    largest = np.abs(wanted).max()
    print(f"difference of logits, of the largest: {np.abs(found - wanted).max() / largest:.1e}")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * largest)


def test_logits_of_an_import_are_those_of_transformers(written):
    model, _, imported = written
    wanted = logits(model, TOKENS)
    assert_close(ours(imported, gtp=8), wanted)
    assert_close(ours(imported, gtp=4, tp=2), wanted)


def test_greedy_tokens_are_those_of_transformers(written):
    model, _, imported = written
    wanted = [greedy(model, prompt, 20) for prompt in PROMPTS]
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        found = gtp.generation.generate(load(imported, dtype="float32"), PROMPTS, max_new_tokens=20)
    assert found.tokens.tolist() == wanted


def test_transformers_reads_an_export_of_an_import_bit_for_bit(written, tmp_path):
    model, _, imported = written
    export_llama(imported, tmp_path / "out", dtype="float32")
    again = read_model(tmp_path / "out")
    assert type(again) is type(model)
    np.testing.assert_array_equal(logits(again, TOKENS), logits(model, TOKENS))


def test_transformers_reads_a_model_that_was_not_imported(written, tmp_path):
    config = saved_config(Checkpoints(written[2], read_only=True).manifest()["extra"])
    config = dataclasses.replace(config, dtype="float32")
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])), Checkpoints(tmp_path / "run") as checkpoints:
        model = gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(0))
        checkpoints.save(1, gtp.TrainState.create(model, optax.sgd(1.0)), saved(config))
    export_llama(tmp_path / "run", tmp_path / "out", dtype="float32", max_positions=256)
    assert_close(logits(read_model(tmp_path / "out"), TOKENS), ours(tmp_path / "run", gtp=8))


def test_the_tokenizer_of_an_export_is_that_of_transformers(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None, byte_fallback=False))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    words.train_from_iterator(["the tokenizer of a model is a part of the model"] * 8, trainer)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>")
    theirs.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    model = random_model("Qwen2")
    model.resize_token_embeddings(len(theirs))
    model.save_pretrained(tmp_path / "hf")
    theirs.save_pretrained(tmp_path / "hf")
    import_llama(tmp_path / "hf", tmp_path / "imported")
    export_llama(tmp_path / "imported", tmp_path / "out", dtype="float32")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the model, and Größe\n\t of a tokenizer<|end|>"
    assert again(text).input_ids == theirs(text).input_ids and again.decode(again(text).input_ids) == text
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the model"}]
    assert again.apply_chat_template(turns, tokenize=False) == theirs.apply_chat_template(turns, tokenize=False)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == len(theirs)
