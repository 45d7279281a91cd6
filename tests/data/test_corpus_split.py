"""Train and held-out text: disjoint, complete, and the same wherever the files are; and the entropy to beat."""

from __future__ import annotations

import math

import numpy as np
import pytest
from messages import naming

from gtp_jax.runner.data import Text, bits_per_byte, load_corpus, read_text, tokens_of, unigram_entropy

from .texts import document, write_documents


def text_of(*documents: str) -> Text:
    return Text("test text", tuple(d.encode() for d in documents))


def documents_of(sides) -> list[bytes]:
    (side,) = sides
    return side.tokens.tobytes().split(b"\0")[:-1]


def test_split_is_disjoint_and_complete():
    text = text_of(*(document(i) for i in range(60)))
    corpus = load_corpus(text, held_out=0.1)
    train, held_out = documents_of(corpus.train), documents_of(corpus.held_out)
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(text.documents)
    assert (len(train), len(held_out)) == (len(corpus.train[0]), len(corpus.held_out[0]))
    assert 0.05 * text.bytes < len(b"".join(held_out)) <= 0.1 * text.bytes


def test_split_goes_by_content_not_by_name_or_order(tmp_path):
    texts = [document(i) for i in range(60)]
    there = load_corpus(text_of(*texts))
    back = load_corpus(text_of(*reversed(texts)))
    assert documents_of(there.held_out) == documents_of(back.held_out)
    one, two = (load_corpus(read_text([write_documents(tmp_path / name)])) for name in ("one", "two"))
    assert one.fingerprint == two.fingerprint


def test_copies_of_a_document_stay_on_one_side():
    texts = [document(i) for i in range(60)]
    corpus = load_corpus(text_of(*texts, *texts), held_out=0.1)
    assert not set(documents_of(corpus.train)) & set(documents_of(corpus.held_out))
    assert len(corpus.held_out[0]) % 2 == 0


def test_tail_is_held_out_when_there_is_one_document():
    whole = "".join(document(i) for i in range(4))
    corpus = load_corpus(text_of(whole), held_out=0.25)
    train, held_out = documents_of(corpus.train)[0], documents_of(corpus.held_out)[0]
    assert (train + held_out).decode() == whole
    train.decode(), held_out.decode()  # no character is cut in two
    assert len(held_out) == pytest.approx(len(whole.encode()) / 4, abs=4)


def test_fingerprint_tells_texts_apart():
    assert load_corpus(text_of("abc" * 99)).fingerprint != load_corpus(text_of("abd" * 99)).fingerprint


def test_a_share_and_too_few_tokens_are_named():
    with pytest.raises(ValueError, match=naming("`held_out` 1.5 0 1")):
        load_corpus(text_of("text"), held_out=1.5)
    corpus = load_corpus(text_of("x" * 999), held_out=0.1)
    assert tokens_of(corpus.train) == 900 and tokens_of(corpus.held_out) == 101
    corpus.check(batch=2, seq=100)
    with pytest.raises(ValueError, match=naming("900 train 1601")):
        corpus.check(batch=16, seq=100)
    with pytest.raises(ValueError, match=naming("101 held out 201")):
        corpus.check(batch=2, seq=200)


def test_the_entropy_is_that_of_held_out_tokens_under_the_train_counts():
    tokens = np.arange(1 << 16, dtype=np.uint32) % 64
    assert unigram_entropy([tokens], [tokens[:320], tokens[320:640]], 64) == pytest.approx(math.log(64))
    train = np.asarray([0] * 3 + [1] * 1, np.uint8)  # counted once more each: 4 and 2 of 6
    wanted = (2 * math.log(6 / 4) + math.log(6 / 2)) / 3
    assert unigram_entropy([train], [np.asarray([0, 0, 1], np.uint8)], 2) == pytest.approx(wanted)
    # a token that never occurred costs a finite amount
    assert unigram_entropy([np.zeros(98, np.uint8)], [np.ones(5, np.uint8)], 2) == pytest.approx(math.log(100))
    tokens = np.random.default_rng(0).integers(0, 9, (1 << 20) + 77).astype(np.uint8)  # counted piece by piece
    p = np.bincount(tokens) / len(tokens)
    assert unigram_entropy([tokens], [tokens], 9) == pytest.approx(-(p * np.log(p)).sum(), rel=1e-6)


def test_bits_per_byte_of_a_uniform_byte_is_8():
    assert bits_per_byte(math.log(256)) == pytest.approx(8)
    assert bits_per_byte(math.log(256), bytes_per_token=4) == pytest.approx(2)
