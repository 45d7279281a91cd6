"""A run that starts from an import keeps its config and tokenizer, which an export writes again; text with tokens that
the model does not know is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shutil
import socket
import subprocess

import jax
import pytest
import tokenizers
from convert.hugging_face import random_tensors, write_model
from messages import naming

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import export_llama, import_llama
from gtp_jax.models import PRESETS, saved_config
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import from_settings
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._corpus import read_corpus
from gtp_jax.runner.trainer._family import abstract_state
from gtp_jax.runner.trainer._start import start_from, started_from, vocab_size_of

from .runs import WORDS, python, refused, small, write_text

jax.devices()  # fixes the number of devices to what the suite runs with

# One layer of the preset `tiny`, as transformers 5 writes it, with fields that gtp_jax does not compute with.
CONFIG = {
    "_name_or_path": "someone/tiny",
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_dropout": 0.0,
    "bos_token_id": 21,
    "eos_token_id": [22, 21],
    "pad_token_id": None,
    "dtype": "float32",
    "attention_bias": None,
    "head_dim": 32,
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "transformers_version": "5.0.0",
    "use_cache": True,
    "vocab_size": 256,
}


def tokenizer(words: list[str], **parts: object) -> bytes:
    """A tokenizer of words; `parts` are its normalizer, decoder and so on."""
    ids = {word: i for i, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>"])
    for name, part in parts.items():
        setattr(made, name, part)
    return made.to_str().encode()


FILES = {
    "tokenizer.json": tokenizer([*WORDS, "?"]),
    "tokenizer_config.json": b'{"model_max_length": 131072,\r\n "eos_token": "</s>"}\r\n',
    "special_tokens_map.json": b'{ "eos_token":"</s>" }',
    "added_tokens.json": b"{}",
    "tokenizer.model": bytes(range(256)),
    "vocab.json": json.dumps({word: i for i, word in enumerate(WORDS)}).encode(),
    "merges.txt": b"#version: 0.2\na b\n",
    "chat_template.jinja": "{{ messages }} \u2603\n".encode(),
    "chat_template.json": b'{"chat_template": ""}\n',
    "generation_config.json": b'{"temperature": 0.6, "eos_token_id": [22, 21]}\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face model, and the checkpoint that it was imported into; `tiny` has its one layer."""
    root = tmp_path_factory.mktemp("model")
    write_model(root / "hf", random_tensors(CONFIG), CONFIG)
    for name, content in FILES.items():
        (root / "hf" / name).write_bytes(content)
    (root / "hf" / "README.md").write_text("not the tokenizer's")
    assert main(["convert", "import", str(root / "hf"), str(root / "imported")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], num_layers=1))
        yield root


def others(directory) -> dict[str, bytes]:
    """All files but those of the weights and config.json."""
    ours = ("config.json", "model.safetensors", "README.md")
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name not in ours}


def config_of(directory) -> dict:
    return json.loads((directory / "config.json").read_text())


def test_the_files_are_those_that_verify_reads(folder, tmp_path, capsys):
    imported = shutil.copytree(folder / "imported", tmp_path / "imported")
    (imported / "0/manifest/files/tokenizer.json").write_bytes(FILES["tokenizer.json"].replace(b"0", b"1"))
    assert main(["checkpoint", "verify", str(imported)]) == 1
    assert "tokenizer.json: changed" in capsys.readouterr().out
    refused(capsys, "tokenizer.json: changed", "convert", "export", imported, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def started(directory, tokenizer):
    """The parameters and the origin of a run, without the run."""
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        config = TrainConfig()
        return start_from(directory, abstract_state(config, config.model(256, dtype="float32"))[0], tokenizer)


@pytest.mark.parametrize(
    "other",
    ["bytes", tokenizer([*WORDS[::-1], "?"]), tokenizer([*WORDS, "?"], normalizer=tokenizers.normalizers.Lowercase())],
    ids=["bytes", "other ids", "the same ids"],
)
def test_a_tokenizer_other_than_the_runs_is_left_out_with_a_message(folder, tmp_path, capsys, other):
    path = "bytes"
    if other != path:
        path = tmp_path / "tokenizer.json"
        path.write_bytes(other)
    params, origin = started(folder / "imported", path)
    err = capsys.readouterr().err
    assert re.search(naming(f"tokenizer checkpoint {folder / 'imported'} {path} {', '.join(FILES)}"), err)
    with Checkpoints(tmp_path / "c") as checkpoints:
        extra = {"model": TrainConfig().model(256, dtype="float32").architecture(), **origin.extra()}
        checkpoints.save(1, {"params": params}, extra, files=origin.files)
    export_llama(tmp_path / "c", tmp_path / "out", dtype="float32")
    assert others(tmp_path / "out") == {}
    assert config_of(tmp_path / "out") == {**CONFIG, "bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize(("name", "kept"), [("generation_config.json", True), ("added_tokens.json", False)])
def test_files_without_a_part_of_a_tokenizer_stay_with_a_tokenizer_given(folder, tmp_path, capsys, name, kept):
    """The others hold the ids of another tokenizer's tokens, or may."""
    (tmp_path / "hf").mkdir()
    for file in ("config.json", "model.safetensors", name):
        (tmp_path / "hf" / file).write_bytes((folder / "hf" / file).read_bytes())
    import_llama(tmp_path / "hf", tmp_path / "imported")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(FILES["tokenizer.json"])
    assert started(tmp_path / "imported", str(path))[1].files == ({name: FILES[name]} if kept else {})
    assert (name in capsys.readouterr().err) is not kept


def test_the_same_tokenizer_in_another_file_is_kept(folder, text, tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(FILES["tokenizer.json"]), indent=4))
    settings = {"data": (str(text),), "tokenizer": str(path), "from_": str(folder / "imported")}
    config = from_settings(TrainConfig, started_from(settings))
    assert vocab_size_of(config, read_corpus(config), None) == CONFIG["vocab_size"]
    assert started(folder / "imported", str(path))[1].files == FILES
    assert capsys.readouterr().err == ""


@pytest.mark.full
def test_a_runs_checkpoints_have_its_tokenizer_whatever_lies_at_its_path(folder, tmp_path, capsys, monkeypatch):
    path, own, other = tmp_path / "tokenizer.json", FILES["tokenizer.json"], tokenizer([*WORDS[::-1], "?"])
    path.write_bytes(own)
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    flags = small("text", "run", num_layers=1, steps=1, tokenizer="tokenizer.json")
    assert main(["train", *flags]) == 0
    generate = ["generate", "run", "--prompt", WORDS[3], "--temperature=0", "--max-new-tokens=4"]
    assert main(generate) == 0
    text = capsys.readouterr().out
    path.write_bytes(other)
    assert main(generate) == 0 and capsys.readouterr().out.endswith(text.splitlines()[-1] + "\n")
    export_llama(tmp_path / "run" / "checkpoints", tmp_path / "out")
    assert others(tmp_path / "out") == {"tokenizer.json": own}


ROWS = CONFIG["vocab_size"]
# the word "[PAD]" has the id that is the vocabulary's size; the names of the others occur in no text
BEYOND = tokenizer([*WORDS, "?", "</s>", *(f"unused{i}" for i in range(ROWS - len(WORDS) - 2)), "[PAD]"])
FILES_BEYOND = {**FILES, "tokenizer.json": BEYOND}


@pytest.fixture(scope="module")
def beyond(tmp_path_factory):
    """A model whose tokenizer has an id more than it has rows, imported; and text without that id."""
    root = tmp_path_factory.mktemp("model")
    write_model(root / "hf", random_tensors(CONFIG), CONFIG)
    for name, content in FILES_BEYOND.items():
        (root / "hf" / name).write_bytes(content)
    with pytest.warns(UserWarning, match=naming(f"{ROWS} ('[PAD]')")):
        import_llama(root / "hf", root / "imported")
    write_text(root / "text")
    return root


def flags(beyond, text, out, **changes):
    given = {"tokenizer": beyond / "hf/tokenizer.json", "from": beyond / "imported", **changes}
    return small(text, out, num_layers=1, steps=3, seq=16, **given)


@pytest.fixture(scope="module")
def passed_through(beyond, tmp_path_factory):
    """The directory of a run, of its export, and what was printed."""
    run, out = (tmp_path_factory.mktemp("passed") / name for name in ("run", "out"))
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        assert main(["train", *flags(beyond, beyond / "text", run)]) == 0
        assert main(["convert", "export", str(run), str(out), "--dtype", "float32"]) == 0
    return run, out, printed.getvalue(), errors.getvalue()


@pytest.mark.full
def test_text_without_tokens_beyond_the_model_is_trained_on_and_exported_with_config_and_tokenizer(passed_through):
    run, out, printed, errors = passed_through
    assert "left out" not in errors and f"config.json, {', '.join(FILES_BEYOND)}" in printed
    assert others(out) == FILES_BEYOND and config_of(out) == CONFIG
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    assert [checkpoints.files(step) == FILES_BEYOND for step in checkpoints.steps()] == [True, True]
    assert checkpoints.latest() == 3 and saved_config(checkpoints.manifest()["extra"]).vocab_size == ROWS
    assert main(["replay", f"--out={run}", "--step=3"]) in (0, 1)  # it compares, whatever it finds


def test_text_with_a_token_beyond_the_model_is_refused_by_its_id(beyond, tmp_path, capsys):
    text = write_text(tmp_path / "text")
    with (text / "07.txt").open("a") as file:
        file.write(" [PAD]")
    refused(capsys, f"tokenizer.json id {ROWS} 0 {ROWS - 1}", "train", *flags(beyond, text, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_whose_steps_are_in_memory_alone_goes_on_without_the_checkpoint_it_started_from(beyond, tmp_path):
    imported, out = shutil.copytree(beyond / "imported", tmp_path / "imported"), str(tmp_path / "out")
    config = from_settings(TrainConfig, {**started_from({"from_": str(imported)}), "out": out, "batch": 8, "seq": 16})
    config = dataclasses.replace(config, data=(str(beyond / "text"),))
    corpus = read_corpus(config, resume=True)
    shutil.rmtree(imported)
    assert vocab_size_of(config, corpus, tmp_path / "no steps yet") == ROWS
    with pytest.raises(FileNotFoundError, match=naming("imported tokenizer exist")):
        read_corpus(config, resume=True)
    named = dataclasses.replace(config, tokenizer=str(beyond / "hf/tokenizer.json"))
    assert read_corpus(named, resume=True).fingerprint == corpus.fingerprint


WORKER = """
import sys
import jax

address, rank, text, tokenizer, imported, away, unreadable = sys.argv[1:]
jax.distributed.initialize(address, 2, int(rank))
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._corpus import read_corpus
from gtp_jax.runner.trainer._start import vocab_size_of

config = TrainConfig(data=(text,), tokenizer=tokenizer, batch=8, seq=16)
corpus = read_corpus(config)  # whose vocabulary is larger than the checkpoint's
print(vocab_size_of(config, corpus, imported if rank == "0" else away))
try:
    vocab_size_of(config, corpus, unreadable if rank == "0" else imported)
except (OSError, ValueError) as error:
    print(error)
jax.distributed.shutdown()
"""


@pytest.mark.full
def test_processes_that_read_differently_go_on_with_the_vocabulary_that_the_first_has_read(beyond, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shutil.copytree(beyond / "imported", tmp_path / "unreadable")
    manifest = tmp_path / "unreadable/0/manifest/manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest)
    places = [beyond / "text", beyond / "hf/tokenizer.json", beyond / "imported", tmp_path / "no", manifest.parents[2]]
    workers = [python("-c", WORKER, address, rank, *places, stdout=subprocess.PIPE) for rank in range(2)]
    printed = [worker.communicate(timeout=300)[0].splitlines() for worker in workers]
    found = [[line for line in lines if not line.startswith("[Gloo]")] for lines in printed]
    assert [lines[0] for lines in found] == [str(ROWS)] * 2
    assert "symbolic links" in found[0][1] and re.search(naming("process 0 checkpoints"), found[1][1])
