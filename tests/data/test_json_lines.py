"""Documents of JSON lines: the text of each record, or the line that has none."""

from __future__ import annotations

import json

import pytest

from gtp_jax.runner.data import BYTES, load_corpus, read_text

from .texts import document


def write(path, *lines: str):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def records(path, texts, field: str = "text"):
    return write(path, *(json.dumps({"id": i, field: text}) for i, text in enumerate(texts)))


def test_documents_are_the_texts_of_the_records_and_not_their_encoding(tmp_path):
    texts = [document(i) for i in range(30)]
    path = records(tmp_path / "a.jsonl", texts)
    read = read_text([path])
    assert read.records and [one.decode() for one in read.documents] == texts
    assert read.documents[7].decode() == texts[7] and len(read.documents) == 30
    corpus = load_corpus(read, BYTES, held_out=0.1)
    found = b"".join(one.tokens.tobytes() for one in (*corpus.train, *corpus.held_out)).split(b"\0")
    assert sorted(found[:-1]) == sorted(text.encode() for text in texts)


def test_records_have_the_tokens_that_they_have_as_files(tmp_path):
    texts = [document(i) for i in range(30)]
    (tmp_path / "files").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "files" / f"{i:02d}.txt").write_text(text)
    path = records(tmp_path / "a.jsonl", texts)
    assert load_corpus(read_text([path])).fingerprint == load_corpus(read_text([tmp_path / "files"])).fingerprint


def test_files_and_folders_come_in_the_order_given(tmp_path):
    (tmp_path / "folder").mkdir()
    records(tmp_path / "folder" / "b.jsonl", ["b"])
    records(tmp_path / "folder" / "a.ndjson", ["a"])
    write(tmp_path / "c.txt", "c")
    read = read_text([tmp_path / "c.txt", tmp_path / "folder", tmp_path / "c.txt"])
    assert list(read.documents) == [b"c", b"a", b"b", b"c"] and read.documents[-2] == b"b"


def test_blank_lines_line_ends_and_a_byte_order_mark_are_no_records(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n\n{"text": "b"}')
    assert list(read_text([tmp_path / "a.jsonl"]).documents) == [b"a", b"b"]


def test_a_field_of_another_name_is_asked_for(tmp_path):
    path = records(tmp_path / "a.jsonl", ["a"], "content")
    assert list(read_text([path], text_field="content").documents) == [b"a"]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: there is no field 'text'; it has id, content\. .*--te"):
        list(read_text([path]).documents)
    with pytest.raises(ValueError, match=r"or write conversations as `messages`, objects with `role` and `content`\."):
        list(read_text([path]).documents)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", r"line 3: it is not JSON \(Expecting property name.* at column 2\)\. Write one"),
        ('{"text": ', r"line 3: it is not JSON \(Expecting value at column 10\)\. Write one"),
        ("1" * 5000, r"line 3: it is not JSON \(Exceeds the limit"),
        ('["text"]', r"line 3: it holds \['text'\]; it must be an object"),
        ('{"text": 5}', r"line 3: the field 'text' is 5; it must be text"),
        ('{"text": null}', r"line 3: the field 'text' is None; it must be text"),
        ('{"text": "a\\u0000b"}', r"line 3: the text has a zero byte at 1, which separates documents"),
        ('{"text": "a\\ud800"}', r"line 3: the text has a lone surrogate, U\+D800"),
        ('{"\\u001b[0m": 5}', r"line 3: there is no field 'text'; it has \\x1b\[0m\."),
        ("{}", r"line 3: there is no field 'text'; it has none\."),
        ("[" * 100_000, r"line 3: it has too many levels"),
    ],
)
def test_a_line_without_a_text_is_named_by_its_number(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", '{"text": "a"}', "", line, '{"text": "b"}')
    with pytest.raises(ValueError, match=message):
        load_corpus(read_text([path]))


def test_a_line_that_is_not_utf_8_and_a_file_without_records_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"line 2: byte 0xff is not UTF-8\. Convert the file"):
        list(read_text([tmp_path / "a.jsonl"]).documents)
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: there is no record"):
        read_text([tmp_path / "empty.jsonl"])
