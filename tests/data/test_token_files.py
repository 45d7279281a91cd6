"""Files of token ids: mapped, cut where the separator is, and refused if an id is outside of the vocabulary."""

from __future__ import annotations

import resource

import numpy as np
import pytest
from messages import naming

from gtp_jax.runner.data import BYTES, Documents, Packed, Windows, load_corpus, load_source, read_text, tokens_of
from gtp_jax.runner.data._token_files import read_tokens

TOKENS = np.random.default_rng(0).integers(1, 256, 4000)
TOKENS[[99, 1000, 1500, 3850]] = 0  # ends of documents


def llm_c(tokens, magic: int, version: int, dtype: str) -> bytes:
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens)
    return head.tobytes() + tokens.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "<u4", ">i4", "int64"])
def test_an_array_is_mapped_and_its_documents_end_with_the_separator(tmp_path, dtype):
    np.save(tmp_path / "a.npy", TOKENS.astype(dtype))
    documents = read_tokens(tmp_path / "a.npy", BYTES)
    assert isinstance(documents.tokens, np.memmap)
    np.testing.assert_array_equal(documents.tokens, TOKENS)
    assert documents.offsets.tolist() == [0, 100, 1001, 1501, 3851, 4000]


@pytest.mark.parametrize(
    ("content", "dtype"),
    [
        (TOKENS.astype("<u2").tobytes(), "uint16"),
        (TOKENS.astype("<i4").tobytes(), "int32"),
        (llm_c(TOKENS, 20240520, 1, "<u2"), None),
        (llm_c(TOKENS, 20240801, 7, "<u4"), "uint32"),
    ],
    ids=["stated", "stated wide", "header", "header and stated"],
)
def test_a_binary_file_has_the_dtype_that_is_stated_or_in_its_header(tmp_path, content, dtype):
    (tmp_path / "a.bin").write_bytes(content)
    np.testing.assert_array_equal(read_tokens(tmp_path / "a.bin", BYTES, dtype).tokens, TOKENS)


def test_a_row_reads_its_own_tokens_alone(tmp_path):
    size = 1 << 35  # bytes, of which the file system stores none
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(size)
    tokens = np.memmap(tmp_path / "a.bin", np.uint8, "r")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    packed = Packed(Documents(tokens, np.asarray([0, 1 << 34, size])), 1 << 16, seed=1)
    for rows in (Windows(tokens, 1 << 16), packed):
        assert rows.rows(np.asarray([0, 10**9]))["targets"].shape == (2, 1 << 16)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_the_last_documents_are_held_out_and_nothing_is_copied(tmp_path):
    np.save(tmp_path / "a.npy", TOKENS.astype(np.uint16))
    source = load_source(read_text([tmp_path / "a.npy"]))
    (train,), (held_out,) = source.train, source.held_out
    assert (len(train.tokens), len(held_out.tokens)) == (3851, 149) and len(train) == 4 and len(held_out) == 1
    assert isinstance(train.tokens.base, np.memmap) or isinstance(train.tokens, np.memmap)
    np.testing.assert_array_equal(np.concatenate([train.tokens, held_out.tokens]), TOKENS)


def test_the_end_of_a_last_document_that_is_longer_is_held_out(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(1000, np.uint8))
    corpus = load_corpus(read_text([tmp_path / "a.npy"]), held_out=0.25)
    assert (tokens_of(corpus.train), tokens_of(corpus.held_out)) == (750, 250)
    assert corpus.bytes_per_token == 1


def save(path, array):
    np.save(path, array)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "dtype", "message"),
    [
        ("a.bin", b"\1\0" * 50, None, "--token-dtype uint8 uint16"),
        ("a.bin", b"\1\0" * 50 + b"\1", "uint16", "101 bytes 2 uint16"),
        ("a.bin", b"\1\1" * 50, "uint16", "id 257 at 0 0 to 255"),
        ("a.bin", llm_c(TOKENS, 20240520, 1, "<u2")[:-2], None, "header 4000 tokens uint16"),
        ("a.npy", np.zeros((3, 4), np.uint8), None, "uint8 (3, 4)"),
        ("a.npy", np.asarray([3, -1, -2]), None, "id -1 at 1 0 to 255"),
        ("a.npy", np.asarray([1, object()]), None, "read numpy.save"),
    ],
)
def test_what_holds_no_ids_of_the_tokenizer_is_refused(tmp_path, name, content, dtype, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else save(path, content))
    with pytest.raises(ValueError, match=naming(message)):
        load_source(read_text([path]), BYTES, token_dtype=dtype)
