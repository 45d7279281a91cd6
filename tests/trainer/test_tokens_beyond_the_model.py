"""Text that a model's tokenizer reads is trained on if the model knows its tokens, and refused otherwise."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shutil
import socket
import subprocess

import jax
import pytest
from convert.hugging_face import random_tensors, write_model
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import import_llama
from gtp_jax.models import saved_config
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import from_settings
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._corpus import read_corpus
from gtp_jax.runner.trainer._start import started_from, vocab_size_of

from .runs import WORDS, python, refused, small, write_text
from .test_origin_kept import CONFIG, config_of, others, tokenizer
from .test_origin_kept import FILES as FILES_OF_WORDS

jax.devices()  # fixes the number of devices to what the suite runs with

ROWS = CONFIG["vocab_size"]
# the word "[PAD]" has the id that is the vocabulary's size; the names of the others occur in no text
TOKENIZER = tokenizer([*WORDS, "?", "</s>", *(f"unused{i}" for i in range(ROWS - len(WORDS) - 2)), "[PAD]"])
FILES = {**FILES_OF_WORDS, "tokenizer.json": TOKENIZER}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokenizer has an id more than it has rows, imported; and text without that id."""
    root = tmp_path_factory.mktemp("model")
    write_model(root / "hf", random_tensors(CONFIG), CONFIG)
    for name, content in FILES.items():
        (root / "hf" / name).write_bytes(content)
    with pytest.warns(UserWarning, match=naming(f"{ROWS} ('[PAD]')")):
        import_llama(root / "hf", root / "imported")
    write_text(root / "text")
    return root


def flags(folder, text, out, **changes):
    given = {"tokenizer": folder / "hf/tokenizer.json", "from": folder / "imported", **changes}
    return small(text, out, num_layers=1, steps=3, seq=16, **given)


@pytest.fixture(scope="module")
def passed_through(folder, tmp_path_factory):
    """The directory of a run, of its export, and what was printed."""
    run, out = (tmp_path_factory.mktemp("passed") / name for name in ("run", "out"))
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        assert main(["train", *flags(folder, folder / "text", run)]) == 0
        assert main(["convert", "export", str(run), str(out), "--dtype", "float32"]) == 0
    return run, out, printed.getvalue(), errors.getvalue()


def test_text_without_them_is_trained_on_and_exported_with_config_and_tokenizer(passed_through):
    run, out, printed, errors = passed_through
    assert "left out" not in errors and f"config.json, {', '.join(FILES)}" in printed
    assert others(out) == FILES and config_of(out) == CONFIG
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    assert [checkpoints.files(step) == FILES for step in checkpoints.steps()] == [True, True]
    assert checkpoints.latest() == 3 and saved_config(checkpoints.manifest()["extra"]).vocab_size == ROWS
    assert main(["replay", f"--out={run}", "--step=3"]) in (0, 1)  # it compares, whatever it finds


@pytest.mark.full
def test_a_resumed_run_keeps_config_and_tokenizer(passed_through, tmp_path):
    run, out = shutil.copytree(passed_through[0], tmp_path / "run"), tmp_path / "out"
    assert main(["train", f"--out={run}", "--resume", "--steps=4"]) == 0
    assert Checkpoints(run / "checkpoints", read_only=True).files(4) == FILES
    assert main(["convert", "export", str(run), str(out), "--dtype", "float32"]) == 0
    assert others(out) == FILES and config_of(out) == CONFIG


def test_text_with_one_is_refused_by_its_id(folder, tmp_path, capsys):
    text = write_text(tmp_path / "text")
    with (text / "07.txt").open("a") as file:
        file.write(" [PAD]")
    refused(capsys, f"tokenizer.json id {ROWS} 0 {ROWS - 1}", "train", *flags(folder, text, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_whose_steps_are_in_memory_alone_goes_on_without_the_checkpoint_it_started_from(folder, tmp_path):
    imported, out = shutil.copytree(folder / "imported", tmp_path / "imported"), str(tmp_path / "out")
    config = from_settings(TrainConfig, {**started_from({"from_": str(imported)}), "out": out, "batch": 8, "seq": 16})
    config = dataclasses.replace(config, data=(str(folder / "text"),))
    corpus = read_corpus(config, resume=True)
    shutil.rmtree(imported)
    assert vocab_size_of(config, corpus, tmp_path / "no steps yet") == ROWS
    with pytest.raises(FileNotFoundError, match=naming("imported tokenizer exist")):
        read_corpus(config, resume=True)
    named = dataclasses.replace(config, tokenizer=str(folder / "hf/tokenizer.json"))
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
def test_processes_that_read_differently_go_on_with_the_vocabulary_that_the_first_has_read(folder, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    places = [folder / "text", folder / "hf/tokenizer.json", folder / "imported"]
    places += [tmp_path / "nothing here", tmp_path / "unreadable"]
    shutil.copytree(folder / "imported", tmp_path / "unreadable")
    manifest = tmp_path / "unreadable/0/manifest/manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest)
    workers = [python("-c", WORKER, address, rank, *places, stdout=subprocess.PIPE) for rank in range(2)]
    printed = [worker.communicate(timeout=300)[0].splitlines() for worker in workers]
    found = [[line for line in lines if not line.startswith("[Gloo]")] for lines in printed]
    assert [lines[0] for lines in found] == [str(ROWS)] * 2
    assert "symbolic links" in found[0][1] and re.search(naming("process 0 checkpoints"), found[1][1])
