"""Hugging Face tokenizer files: their tokens, and which are of one tokenizer."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap

import numpy as np
import pytest
from messages import naming

from gtp_jax.runner.data import BYTES, load_tokenizer, same_tokenizer
from gtp_jax.runner.data._chat_template import ChatTemplate
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


def test_documents_are_round_trips_with_separators(tokenizer_file):
    tokenizer, plain = load_tokenizer(tokenizer_file), tokenizers.Tokenizer.from_file(str(tokenizer_file))
    documents = [document(i) for i in range(3)]
    stream = tokenizer.documents(d.encode() for d in documents).tokens
    assert stream.dtype == np.uint16 and stream.max() < tokenizer.vocab_size
    ends = np.flatnonzero(stream == tokenizer.separator)
    assert len(ends) == 3 and ends[-1] == len(stream) - 1
    assert [plain.decode(part[:-1].tolist()) for part in np.split(stream, ends + 1)[:3]] == documents
    # the separator is the tokenizer's own end, or one token more
    own, size = plain.token_to_id("<|endoftext|>"), plain.get_vocab_size()
    assert (tokenizer.separator, tokenizer.vocab_size) == ((own, size) if own is not None else (size, size + 1))


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
    with pytest.raises(ValueError, match=naming("`tokenizer` special.json token 1 b'a </s> a'")):
        special.documents([b"a </s> a"])
    plain = words_with_an_end(tmp_path / "plain.json", special=False)
    assert plain.separator == 3 and plain.documents([b"a </s>"]).tokens.tolist() == [0, 1, 3]


def test_files_that_are_no_tokenizer_are_named(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 2**24}, unk_token="a"))
    words.save(str(tmp_path / "large.json"))
    for name, message in (
        ("bad.json", "`tokenizer` bad.json tokenizer.json"),
        ("large.json", "16777216 16777215"),
    ):
        with pytest.raises(ValueError, match=naming(message)):
            load_tokenizer(tmp_path / name)


def test_a_token_outside_the_vocabulary_is_refused_by_name_and_position():
    broken = dataclasses.replace(BYTES, vocab_size=100, name="broken")
    message = "`tokens of a document by broken` 122 (2,) 100"
    with pytest.raises(ValueError, match=naming(message)):
        broken.documents([b"ABz"])


_VOCABULARY = {token: i for i, token in enumerate(["a", "b", "c", "ab", "bc", "</s>"])}


def made(*merges: tuple[str, str], **parts: object) -> bytes:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(_VOCABULARY, list(merges or [("a", "b"), ("b", "c")])))
    tokenizer.add_special_tokens(["</s>"])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer.to_str().encode()


@pytest.mark.parametrize(
    "other",
    [
        made(("b", "c"), ("a", "b")),
        made(normalizer=tokenizers.normalizers.Lowercase()),
        made(pre_tokenizer=tokenizers.pre_tokenizers.WhitespaceSplit()),
        made(post_processor=tokenizers.processors.TemplateProcessing("$A </s>", None, [("</s>", 5)])),
        made(decoder=tokenizers.decoders.ByteLevel()),
        b"{}",
    ],
    ids=["merges", "normalizer", "pre-tokenizer", "post-processor", "decoder", "no tokenizer"],
)
def test_with_the_same_ids_every_other_part_counts(tmp_path, other):
    (tmp_path / "tokenizer.json").write_bytes(made())
    assert not same_tokenizer(tmp_path / "tokenizer.json", other)


def test_padding_truncation_and_layout_do_not_count(tmp_path):
    padded = tokenizers.Tokenizer.from_buffer(made())
    padded.enable_padding(length=8)
    padded.enable_truncation(8)
    fields = json.loads(padded.to_str())
    fields["model"]["vocab"] = dict(reversed(fields["model"]["vocab"].items()))
    fields["model"]["merges"] = [" ".join(pair) for pair in fields["model"]["merges"]]  # as older versions write them
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields, indent=3))
    assert same_tokenizer(tmp_path / "tokenizer.json", made())


@pytest.mark.parametrize(
    ("package", "make", "message"),
    [
        ("tokenizers", lambda: load_tokenizer("tokenizer.json"), '`pip install "gtp_jax[tokenizers]"`'),
        ("jinja2", lambda: ChatTemplate("", None, "it"), 'Jinja2 `pip install "gtp_jax[chat]"`'),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(package, make, message, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=naming(message)):
        make()
