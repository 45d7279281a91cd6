"""Hugging Face tokenizer files."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gtp_jax.data import BYTES, Text, load_corpus, load_tokenizer

from .texts import document

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(params=[["<|endoftext|>"], []], ids=["end-token", "no-end-token"])
def tokenizer_file(request, tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=request.param, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((document(i) for i in range(20)), trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_round_trip_with_separators(tokenizer_file):
    tokenizer = load_tokenizer(tokenizer_file)
    documents = [document(i) for i in range(3)]
    stream = tokenizer.stream(d.encode() for d in documents)
    assert stream.dtype == np.uint16 and stream.max() < tokenizer.vocab_size
    ends = np.flatnonzero(stream == tokenizer.separator)
    assert len(ends) == 3 and ends[-1] == len(stream) - 1
    plain = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    parts = np.split(stream, ends + 1)[:3]
    assert [plain.decode(part[:-1].tolist()) for part in parts] == documents


def test_separator_is_the_tokenizers_own_end_or_one_token_more(tokenizer_file):
    tokenizer = load_tokenizer(tokenizer_file)
    plain = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    own = plain.token_to_id("<|endoftext|>")
    size = plain.get_vocab_size()
    assert (tokenizer.separator, tokenizer.vocab_size) == ((own, size) if own is not None else (size, size + 1))


def test_corpus_counts_bytes_a_token(tokenizer_file):
    text = Text("words", tuple(document(i).encode() for i in range(60)))
    corpus = load_corpus(text, load_tokenizer(tokenizer_file))
    assert corpus.bytes_per_token > 2
    assert load_corpus(text, BYTES).bytes_per_token == 1


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"`tokenizer` .*none\.json is not a file\. Give the tokenizer\.json"):
        load_tokenizer(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"`tokenizer` .*bad\.json cannot be read as a Hugging Face tokenizer\.json"):
        load_tokenizer(tmp_path / "bad.json")


def test_ids_with_gaps_are_all_within_the_vocabulary(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 300, "[SEP]": 7}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert (loaded.vocab_size, loaded.separator) == (301, 7)
    assert loaded.stream([b"b a b"]).tolist() == [300, 0, 300, 7]


def test_a_token_outside_the_vocabulary_is_refused_by_name_and_position():
    broken = dataclasses.replace(BYTES, vocab_size=100, name="broken")
    message = r"`tokens of a document by broken` has the id 122 at position \(2,\): outside the vocabulary of 100"
    with pytest.raises(ValueError, match=message):
        broken.stream([b"ABz"])
