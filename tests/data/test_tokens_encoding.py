"""Hugging Face tokenizer files."""

from __future__ import annotations

import dataclasses
import textwrap

import numpy as np
import pytest

from gtp_jax.runner.data import BYTES, Text, load_corpus, load_tokenizer
from gtp_jax.runner.data._tokens import _parts

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
    stream = tokenizer.documents(d.encode() for d in documents).tokens
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


def test_parts_of_documents_are_the_tokens_of_each(tokenizer_file, monkeypatch):
    documents = ["\n".join(textwrap.wrap(document(i), 80)).encode() for i in range(5)]
    whole = load_tokenizer(tokenizer_file).documents(documents).tokens
    monkeypatch.setattr("gtp_jax.runner.data._tokens._PART_BYTES", 400)
    assert sum(len(_parts(d, "name")) for d in documents) > 5
    parts = load_tokenizer(tokenizer_file)
    stream = parts.documents(documents).tokens
    assert np.sum(stream == parts.separator) == np.sum(whole == parts.separator) == 5
    plain = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    ends = np.flatnonzero(stream == parts.separator)
    for text, ids in zip(documents, np.split(stream, ends + 1), strict=False):
        assert plain.decode(ids[:-1].tolist()).encode() == text


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
    assert (loaded.vocab_size, loaded.separator) == (302, 301)  # [SEP] is a word of it, and no special token
    assert loaded.documents([b"b a b"]).tokens.tolist() == [300, 0, 300, 301]


def words_with_an_end(path, **end):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_tokens([tokenizers.AddedToken("</s>", **end)])
    words.save(str(path))
    return load_tokenizer(path)


def test_a_separator_is_never_a_word(tmp_path):
    special = words_with_an_end(tmp_path / "special.json", special=True)
    assert special.separator == 1
    assert special.documents([b"a b</s>"]).tokens.tolist() == [0, 2, 1]  # split as other text is
    with pytest.raises(
        ValueError, match=r"`tokenizer` special.json encodes a word as the token 1, which separates .*b'a </s> a'"
    ):
        special.documents([b"a </s> a"])
    plain = words_with_an_end(tmp_path / "plain.json", special=False)
    assert plain.separator == 3 and plain.documents([b"a </s>"]).tokens.tolist() == [0, 1, 3]


def test_ids_without_end_are_refused(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 2**24}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"has the id 16777216; ids must be at most 16777215\. Give the "):
        load_tokenizer(tmp_path / "tokenizer.json")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({})).save(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none.json has no token"):
        load_tokenizer(tmp_path / "none.json")


def test_a_large_document_is_encoded_in_parts_that_end_with_a_line():
    document = b"some words\n" * 2_000_000
    parts = _parts(document, "name")
    assert b"".join(parts) == document and len(parts) == 2 and parts[0].endswith(b"\n")
    assert max(map(len, parts)) <= 1 << 24
    with pytest.raises(ValueError, match=r"a line of more than 16777216 bytes, too long for `tokenizer` name"):
        _parts(b"a\n" + b"x" * (1 + (1 << 24)), "name")


def test_a_token_outside_the_vocabulary_is_refused_by_name_and_position():
    broken = dataclasses.replace(BYTES, vocab_size=100, name="broken")
    message = r"`tokens of a document by broken` has the id 122 at position \(2,\): outside the vocabulary of 100"
    with pytest.raises(ValueError, match=message):
        broken.documents([b"ABz"])
