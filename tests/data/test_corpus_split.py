"""Train and held-out text: disjoint, complete, and the same wherever the files are."""

from __future__ import annotations

import pytest

from gtp_jax.runner.data import BYTES, Text, load_corpus, read_text, tokens_of

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


def test_round_trip_through_bytes():
    documents = [document(i) for i in range(5)]
    assert [d.decode() for d in documents_of([BYTES.documents(d.encode() for d in documents)])] == documents


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


def test_share_must_be_between_0_and_1():
    with pytest.raises(ValueError, match=r"`held_out` is 1\.5; it must be a share between 0 and 1"):
        load_corpus(text_of("text"), held_out=1.5)


def test_too_few_tokens_says_how_many_came_and_how_many_are_needed():
    corpus = load_corpus(text_of("x" * 999), held_out=0.1)
    assert tokens_of(corpus.train) == 900 and tokens_of(corpus.held_out) == 101
    corpus.check(batch=2, seq=100)
    with pytest.raises(ValueError, match=r"too few tokens: test text has 900 to train on, but .*needs 1601\."):
        corpus.check(batch=16, seq=100)
    with pytest.raises(ValueError, match=r"too few tokens: test text has 101 held out, but .*needs 201\."):
        corpus.check(batch=2, seq=200)
