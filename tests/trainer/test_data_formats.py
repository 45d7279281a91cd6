"""What a run trains and evaluates on: text, records, token ids, mixtures, whole documents. Another mesh goes on with
the same rows; other rows are refused."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import warnings

import jax
import numpy as np
import pytest
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._corpus import read_corpus

from .runs import WORDS, losses, refused, small, write_text

jax.devices()  # fixes the number of devices to what the suite runs with

SIZES = dict(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=32)
CONSTANT = dict(schedule="constant", warmup=0)  # a schedule that does not depend on where a run is to end


def words(seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=40))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"content": words(i)}) + "\n" for i in range(200)))
    (tmp_path / "b.txt").write_text("".join(words(i) for i in range(1000, 1100)))
    np.save(tmp_path / "c.npy", np.frombuffer("\0".join(words(i) for i in range(2000, 2100)).encode(), np.uint8))
    return tmp_path


def flags(out, *data, **changes):
    more = {**SIZES, **CONSTANT, "eval_every": 2, "steps": 4, "text_field": "content", "gtp": 8, "tp": 1, **changes}
    return ["--data", *map(str, data), *small(None, out, **{"data": None, **more})]


def contents(parts):
    """The tokens of each document."""
    for part in parts:
        yield from (part.tokens[begin:end].tobytes() for begin, end in itertools.pairwise(part.offsets))


@pytest.mark.full
def test_a_mixture_goes_on_another_mesh_as_if_never_stopped(folder, capsys):
    mixed = [f"{folder / 'a.jsonl'}:0.5", f"{folder / 'b.txt'}:0.3", f"{folder / 'c.npy'}:0.2"]
    assert main(["train", *flags(folder / "whole", *mixed)]) == 0
    assert "of whole documents; " in capsys.readouterr().out  # because some are records
    shutil.copytree(folder / "whole", folder / "parts")
    resumed = ["train", "--resume", f"--out={folder / 'parts'}", "--gtp=4", "--tp=2"]
    assert main([*resumed, "--step=2"]) == 0
    assert losses(folder / "parts") == pytest.approx(losses(folder / "whole"), rel=1e-5)
    # other weights, or other text, are other rows
    weights = [mixed[0], mixed[1], f"{folder / 'c.npy'}:0.3"]
    refused(capsys, "text tokenizer changed", *resumed, "--steps=6", "--data", *weights)
    (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text().replace("weight", "height"))
    refused(capsys, "text tokenizer changed", *resumed, "--steps=6")


@pytest.mark.full
def test_documents_that_are_packed_otherwise_are_refused_on_resume(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *small(text, out, packing="documents", seq=64, steps=2, **SIZES)]) == 0
    assert len(Checkpoints(out / "checkpoints", read_only=True).manifest()["extra"]["packing"]) == 32
    for flag in ("--seq=32", "--packing=stream"):
        named = "packed --seq --packing --data"
        refused(capsys, named, "train", "--resume", f"--out={out}", "--steps=4", flag)


def test_records_are_packed_and_text_and_ids_are_a_stream_unless_asked_for(folder):
    def packing(*names, **changes):
        data = tuple(str(folder / name) for name in names)
        return read_corpus(TrainConfig(data=data, text_field="content", seq=32, batch=8, **changes)).packing

    assert packing("a.jsonl") == packing("b.txt", "a.jsonl") == "documents"
    assert packing("b.txt", "c.npy") == packing("a.jsonl", packing="stream") == "stream"


def test_held_out_loss_is_of_all_texts_and_of_eval_data_in_any_format(folder):
    data, eval_data = (f"{folder / 'b.txt'}:1", f"{folder / 'c.npy'}:3"), (folder / "a.jsonl", folder / "c.npy")
    more = dict(text_field="content", seq=32, batch=8)
    corpus = read_corpus(TrainConfig(data=data, eval_data=tuple(map(str, eval_data)), **more))
    rows = corpus.held_out_rows(32, 0)
    assert len(rows) == sum((len(one.tokens) - 1) // 32 for one in corpus.held_out) and len(corpus.held_out) == 2
    assert [len(one.documents[0]) for one in corpus.evaluated] == [200, 100]
    assert len(corpus.rows_of(corpus.evaluated[1], 32, 0)) == (len(np.load(folder / "c.npy")) - 1) // 32


def test_what_cannot_be_read_is_refused_before_anything_is_written(folder, capsys):
    out = folder / "out"
    refused(capsys, "a.jsonl line 1 'text' --text-field", "train", *flags(out, folder / "a.jsonl", text_field="text"))
    both = f"{folder}:0.5", f"{folder / 'a.jsonl'}:0.5"
    refused(capsys, f"`data` {folder / 'a.jsonl'} inside {folder} weight", "train", *flags(out, *both))
    refused(capsys, "`token_dtype` --token-dtype", "train", *flags(out, folder / "c.npy", token_dtype="uint16"))
    assert not out.exists()


def test_documents_that_one_weighted_path_holds_out_and_another_trains_on_are_counted(folder):
    documents = [f"{words(i)}\0" for i in range(2000, 2100)]
    rotated = [one[7:-1] + one[:7] + "\0" for one in documents]  # the same bytes in another order
    for name, several in (("d.npy", documents), ("e.npy", documents[::-1]), ("f.npy", rotated[::-1])):
        np.save(folder / name, np.frombuffer("".join(several).encode(), np.uint8))

    def read(*names):
        return read_corpus(TrainConfig(data=tuple(f"{folder / name}:0.5" for name in names), seq=32, batch=8))

    with warnings.catch_warnings(action="error"):
        read("d.npy", "f.npy")
    # the last documents of a file are held out, which here are the first of the other one
    with pytest.warns(UserWarning, match=naming("d.npy holds out trained e.npy")) as found:
        first, second = read("d.npy", "e.npy").sources
    held_out, trained = {*contents(first.held_out)}, {*contents(second.train)}
    assert held_out <= trained
    assert re.search(naming(f"{len(held_out)} of {len(held_out)}"), str(found[0].message))


@pytest.mark.full
def test_each_evaluated_text_has_its_own_loss(text, tmp_path, capsys):
    held_out, other, out = write_text(tmp_path / "like it", documents=3), tmp_path / "other.txt", tmp_path / "run"
    other.write_text("".join(chr(200 + i % 50) for i in range(2000)))
    sizes = dict(SIZES, seq=16, lr=0.01, gtp=8, tp=1)
    assert main(["train", *small(text, out, eval_batches=9, **sizes), "--eval-data", str(held_out), str(other)]) == 0
    report = capsys.readouterr().out.partition("\nresult\n")[2]
    first, second = (list(losses(out, f"loss on {path}").values()) for path in (held_out, other))
    held = list(losses(out, "held_out").values())
    assert len(first) == len(second) == len(held) == 3  # steps 0, 4 and 8
    assert abs(first[-1] - held[-1]) < 0.2 < second[-1] - held[-1]  # of the same words, and of others
    for path, loss in ((held_out, first[-1]), (other, second[-1])):
        (line,) = [line for line in report.splitlines() if line.startswith(f"loss on {path} ")]
        assert f" {loss:.3f} nats per token, " in line


@pytest.mark.full
def test_a_run_that_evaluates_on_texts_trains_as_one_without(text, tmp_path):
    sizes, other = dict(SIZES, seq=16, lr=0.01), write_text(tmp_path / "other", documents=3)
    assert main(["train", *small(text, tmp_path / "run", **sizes), "--eval-data", str(other)]) == 0
    assert main(["train", *small(text, tmp_path / "none", **{**sizes, "eval_every": 0, "sample_tokens": 4})]) == 0
    assert losses(tmp_path / "none") == losses(tmp_path / "run", "loss")
    assert Checkpoints(tmp_path / "none" / "checkpoints", read_only=True).steps()[-1] == 8
