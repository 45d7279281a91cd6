"""A run on records, token ids and mixtures, which another mesh goes on with, and which another text does not."""

from __future__ import annotations

import itertools
import json
import random
import re
import warnings

import jax
import numpy as np
import pytest

from gtp_jax.runner.cli import main
from gtp_jax.runner.data import _copies
from gtp_jax.runner.trainer import RunDirectory, TrainConfig
from gtp_jax.runner.trainer._corpus import read_corpus

from .runs import WORDS, read_records

jax.devices()  # fixes the number of devices to what the suite runs with


def text(seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=40))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"content": text(i)}) + "\n" for i in range(200)))
    (tmp_path / "b.txt").write_text("".join(text(i) for i in range(1000, 1100)))
    np.save(tmp_path / "c.npy", np.frombuffer("\0".join(text(i) for i in range(2000, 2100)).encode(), np.uint8))
    return tmp_path


def flags(out, *data, **changes):
    sizes = dict(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=32)
    run = dict(out=out, seq=32, batch=8, eval_every=2, eval_batches=1, save_every=2, steps=4, sample_tokens=0)
    more = {**sizes, **run, "text_field": "content", "schedule": "constant", "warmup": 0, "gtp": 8, "tp": 1, **changes}
    return ["--data", *map(str, data), *(f"--{name.replace('_', '-')}={value}" for name, value in more.items())]


def contents(parts):
    """The tokens of each document."""
    for part in parts:
        yield from (part.tokens[begin:end].tobytes() for begin, end in itertools.pairwise(part.offsets))


def losses(out):
    return {(r["step"], name): r[name] for r in read_records(out) for name in ("loss", "held_out") if name in r}


def test_a_mixture_goes_on_another_mesh_as_if_never_stopped(folder, capsys):
    mixed = [f"{folder / 'a.jsonl'}:0.5", f"{folder / 'b.txt'}:0.3", f"{folder / 'c.npy'}:0.2"]
    assert main(["train", *flags(folder / "whole", *mixed)]) == 0
    assert "of whole documents; " in capsys.readouterr().out  # because some are records
    assert main(["train", *flags(folder / "parts", *mixed, steps=2)]) == 0
    resumed = ["train", "--resume", f"--out={folder / 'parts'}", "--steps=4", "--gtp=4", "--tp=2"]
    assert main(resumed) == 0
    assert losses(folder / "parts") == pytest.approx(losses(folder / "whole"), rel=1e-5)
    # other weights, or other text, are other rows
    weights = [mixed[0], mixed[1], f"{folder / 'c.npy'}:0.3"]
    assert main([*resumed, "--steps=6", "--data", *weights]) == 2
    assert "the content of the text or of the tokenizer has changed" in capsys.readouterr().err
    (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text().replace("weight", "height"))
    assert main([*resumed, "--steps=6"]) == 2
    assert "the content of the text or of the tokenizer has changed" in capsys.readouterr().err


def test_records_are_packed_and_text_and_ids_are_a_stream_unless_asked_for(folder):
    def packing(*names, **changes):
        data = tuple(str(folder / name) for name in names)
        return read_corpus(TrainConfig(data=data, text_field="content", seq=32, batch=8, **changes)).packing

    assert packing("a.jsonl") == packing("b.txt", "a.jsonl") == "documents"
    assert packing("b.txt", "c.npy") == packing("a.jsonl", packing="stream") == "stream"


def test_held_out_loss_is_of_all_texts_and_of_eval_data_in_any_format(folder):
    config = TrainConfig(
        data=(f"{folder / 'b.txt'}:1", f"{folder / 'c.npy'}:3"),
        eval_data=(str(folder / "a.jsonl"), str(folder / "c.npy")),
        text_field="content",
        seq=32,
        batch=8,
    )
    corpus = read_corpus(config)
    rows = corpus.held_out_rows(32, 0)
    assert len(rows) == sum((len(one.tokens) - 1) // 32 for one in corpus.held_out) and len(corpus.held_out) == 2
    assert [len(one.documents[0]) for one in corpus.evaluated] == [200, 100]
    assert len(corpus.rows_of(corpus.evaluated[1], 32, 0)) == (len(np.load(folder / "c.npy")) - 1) // 32


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            ["a.jsonl"],
            "a.jsonl, line 1: there is no field 'text'; it has content. Name the field of the text with --te",
        ),
        (["b.txt:1", "c.npy"], "`data` gives weights to some paths, but none to "),
        (["c.npy:-1"], "c.npy:-1 has the weight -1; it must be a number above 0"),
        (["nowhere.jsonl:1"], "nowhere.jsonl does not exist"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_is_written(folder, data, message, capsys):
    out = folder / "run"
    assert main(["train", *flags(out, *(folder / name for name in data), text_field="text")]) == 2
    assert message in capsys.readouterr().err and not RunDirectory(out).root.exists()


def test_weighted_paths_of_which_one_contains_the_other_are_refused(folder, capsys):
    assert main(["train", *flags(folder / "out", f"{folder}:0.5", f"{folder / 'a.jsonl'}:0.5")]) == 2
    said = capsys.readouterr().err
    assert f"`data` {folder / 'a.jsonl'} is inside {folder}, and both have a weight" in said
    assert "remove the weights" in said


def test_documents_that_one_weighted_path_holds_out_and_another_trains_on_are_counted(folder):
    documents = [f"{text(i)}\0" for i in range(2000, 2100)]
    rotated = [one[7:-1] + one[:7] + "\0" for one in documents]  # the same bytes in another order
    for name, several in (("d.npy", documents), ("e.npy", documents[::-1]), ("f.npy", rotated[::-1])):
        np.save(folder / name, np.frombuffer("".join(several).encode(), np.uint8))

    def read(*names):
        return read_corpus(TrainConfig(data=tuple(f"{folder / name}:0.5" for name in names), seq=32, batch=8))

    with warnings.catch_warnings(action="error"):
        read("d.npy", "f.npy")
    # the last documents of a file are held out, which here are the first of the other one
    with pytest.warns(UserWarning, match=r"documents that .*d.npy holds out are also trained on, in .*e.npy") as found:
        first, second = read("d.npy", "e.npy").sources
    held_out, trained = {*contents(first.held_out)}, {*contents(second.train)}
    assert held_out <= trained and str(found[0].message).startswith(f"{len(held_out)} of {len(held_out)} ")


def test_copies_among_many_weighted_paths_are_found_by_reading_each_once(folder, monkeypatch):
    documents = [f"{text(i)}\0" for i in range(3000, 3100)]
    rotated = [one[7:-1] + one[:7] + "\0" for one in documents]
    for name, several in (("g.npy", documents), ("h.npy", documents[::-1]), ("i.npy", rotated)):
        np.save(folder / name, np.frombuffer("".join(several).encode(), np.uint8))
    read, keys = [], _copies._keys
    monkeypatch.setattr(_copies, "_keys", lambda parts: (read.append(parts), keys(parts))[1])
    with pytest.warns(UserWarning, match="are also trained on") as found:
        corpus = read_corpus(
            TrainConfig(data=tuple(f"{folder / name}:1" for name in ("g.npy", "i.npy", "h.npy")), seq=32, batch=8)
        )
    pairs = [re.findall(r"(\w)\.npy", str(one.message)) for one in found]
    assert pairs == [["g", "h"], ["h", "g"]]
    assert sorted(map(id, read)) == sorted(id(part) for one in corpus.sources for part in (one.train, one.held_out))


def test_a_dtype_of_tokens_that_no_file_needs_is_refused(folder, capsys):
    assert main(["train", *flags(folder / "out", folder / "c.npy", token_dtype="uint16")]) == 2
    assert "`token_dtype` is given, but no `data` is a `.bin` file. Remove --token-dtype" in capsys.readouterr().err


def test_a_dtype_of_tokens_is_for_a_file_of_any_case(folder):
    (folder / "C.BIN").write_bytes(np.load(folder / "c.npy").astype("<u2").tobytes())
    corpus = read_corpus(TrainConfig(data=(str(folder / "C.BIN"),), seq=32, batch=8, token_dtype="uint16"))
    assert corpus.train[0].tokens.dtype == np.uint16


def test_files_of_token_ids_that_are_too_short_for_a_row_are_named(folder):
    np.save(folder / "d.npy", np.arange(20, dtype=np.uint8))
    data = (str(folder / "c.npy"), str(folder / "d.npy"))
    with pytest.warns(UserWarning, match=r"1 of 2 files have at most `seq` = 32 tokens, too few for a row"):
        read_corpus(TrainConfig(data=data, seq=32, batch=8, packing="stream"))
    with warnings.catch_warnings(action="error"):
        read_corpus(TrainConfig(data=data, seq=32, batch=8, packing="documents"))
