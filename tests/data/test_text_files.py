"""Which files and records are read, in which order, and what is said about those that cannot be."""

from __future__ import annotations

import codecs
import json
import os
import warnings

import pytest
from messages import naming

from gtp_jax.runner.data import BYTES, load_corpus, read_text, standard_library

from .texts import document, write_documents


def written(folder, **files: str | bytes):
    """Writes files, in whose names "__" stands for the dot, and returns the folder."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def records(texts, field: str = "text") -> str:
    return "\n".join(json.dumps({"id": i, field: text}) for i, text in enumerate(texts))


def test_standard_library_is_tens_of_megabytes_and_always_the_same():
    first, second = read_text(), standard_library()
    assert first == second
    assert first.bytes > 5e6 and all(first.documents)
    assert any(b"class OrderedDict" in text for text in first.documents)


def test_files_come_in_the_order_given_and_those_of_a_directory_wherever_it_is(tmp_path):
    written(tmp_path, a="text a", b="text b")
    read = read_text([tmp_path / "b", tmp_path / "a"])
    assert read.documents == (b"text b", b"text a") and read.name.endswith("b and 1 more")
    (tmp_path / "deep").mkdir()
    one, two = write_documents(tmp_path / "deep" / "one"), write_documents(tmp_path / "two")
    assert read_text([one]).documents == read_text([two]).documents


def test_files_that_are_not_utf_8_are_left_out_with_the_reason_and_hidden_and_installed_ones_without(tmp_path):
    written(tmp_path, good__txt="good", a__txt="caf\u00e9!".encode("latin-1"), b__txt="text".encode("utf-16"))
    written(tmp_path, c__txt=b"ab\0c", **{"d\n__txt": b"\xff"})
    written(tmp_path / "site-packages", other__py="other")
    (tmp_path / ".hidden").write_text("hidden")
    places = f"{tmp_path}/a.txt byte 0xe9 at 3 {tmp_path}/b.txt 0xff at 0 {tmp_path}/c.txt zero byte at 2 1 more"
    with pytest.warns(UserWarning, match=naming("4 files `data` UTF-8", places)):
        assert read_text([tmp_path]).documents == (b"good",)
    with warnings.catch_warnings(action="error"):
        read_text([tmp_path / "good.txt"])


def test_directories_of_runs_are_left_out_and_refused_if_given(tmp_path):
    for name in ("a", "run", "z/run"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    with pytest.warns(UserWarning, match=naming(f"2 directories of runs `data` {tmp_path}/run")):
        assert read_text([tmp_path], is_run=lambda path: path.name == "run").documents == (b"a",)
    with pytest.raises(ValueError, match=naming(f"`data` {tmp_path}/run run Give")):
        read_text([tmp_path / "run"], is_run=lambda path: path.name == "run")


def test_what_is_no_text_is_refused_without_waiting(tmp_path):
    written(tmp_path, empty__txt="", x__dat=b"\xff\xfe", y__json='[{"text": "a document"}]')
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "device").symlink_to("/dev/zero")
    for path, message in (
        (tmp_path / "nowhere", "nowhere exist"),
        (tmp_path / "empty.txt", "empty.txt empty"),
        (tmp_path / "x.dat", "x.dat UTF-8"),
        (tmp_path / "y.json", "y.json JSON .jsonl"),
        (tmp_path / "fifo", "fifo FIFO regular file"),
        (tmp_path / "device", "device regular file"),
    ):
        with pytest.raises(ValueError, match=naming("`data`", *message.split())):
            read_text([path])
    for name in ("empty.txt", "x.dat", "y.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=naming("directory UTF-8 links")):
        read_text([tmp_path])


def test_links_out_of_a_directory_are_followed_only_if_asked(tmp_path):
    inside, outside = written(tmp_path / "inside", a="a"), written(tmp_path / "outside", b="b")
    (inside / "again").symlink_to("a")
    (inside / "b").symlink_to(outside / "b")
    (inside / "c").symlink_to(outside)
    (outside / "home").symlink_to(inside)  # a loop of directories
    with pytest.warns(UserWarning, match=naming("2 links `data` `follow_links`")):
        assert read_text([inside]).documents == (b"a", b"a")
    assert read_text([inside], follow_links=True).documents == (b"a", b"a", b"b", b"b")


def test_records_among_text_and_text_among_records_are_left_out_with_a_warning(tmp_path):
    written(tmp_path, README__md="read me, it is more than the records", train__jsonl="{}")
    with pytest.warns(UserWarning, match=naming("1 records train.jsonl")):
        text = read_text([tmp_path])
    assert len(text.documents) == 1 and text.unread == ("1 files of records",)
    written(tmp_path, README__md="read me", train__jsonl='{"text": "more than the text"}', tokens__bin=bytes(100))
    with pytest.warns(UserWarning, match=naming("1 other records README.md")):
        text = read_text([tmp_path])
    assert list(text.documents) == [b"more than the text"] and text.token_files == (tmp_path / "tokens.bin",)
    (tmp_path / "link.txt").symlink_to(tmp_path / "train.jsonl")  # which is read like the file
    assert list(read_text([tmp_path / "link.txt"]).documents) == [b"more than the text"]


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_no_part_of_its_text(tmp_path):
    mark = codecs.BOM_UTF8
    written(tmp_path, a__txt=mark + b"one", b__txt=b"two" + mark, c__txt=mark)
    text = read_text([tmp_path])
    assert text.documents == (b"one", b"two" + mark)
    assert read_text([tmp_path / "a.txt", tmp_path / "b.txt"]).documents == text.documents
    with pytest.raises(ValueError, match=naming("c.txt empty")):
        read_text([tmp_path / "c.txt"])


def test_documents_are_the_texts_of_records_and_not_their_encoding(tmp_path):
    texts = [document(i) for i in range(30)]
    written(tmp_path, a__jsonl=records(texts))
    read = read_text([tmp_path / "a.jsonl"])
    assert read.records and [one.decode() for one in read.documents] == texts
    assert read.documents[7].decode() == texts[7] and len(read.documents) == 30
    corpus = load_corpus(read, BYTES, held_out=0.1)
    found = b"".join(one.tokens.tobytes() for one in (*corpus.train, *corpus.held_out)).split(b"\0")
    assert sorted(found[:-1]) == sorted(text.encode() for text in texts)
    files = written(tmp_path / "files", **{f"{i:02d}__txt": text for i, text in enumerate(texts)})
    assert load_corpus(read_text([files])).fingerprint == load_corpus(read).fingerprint


def test_blank_lines_line_ends_and_a_byte_order_mark_are_no_records(tmp_path):
    written(tmp_path, a__jsonl=b'\xef\xbb\xbf{"text": "a"}\r\n\r\n\n{"text": "b"}')
    assert list(read_text([tmp_path / "a.jsonl"]).documents) == [b"a", b"b"]


def test_a_field_of_another_name_is_asked_for(tmp_path):
    path = written(tmp_path, a__jsonl=records(["a"], "content")) / "a.jsonl"
    assert list(read_text([path], text_field="content").documents) == [b"a"]
    with pytest.raises(ValueError, match=naming("a.jsonl line 1 'text' id content --text-field `messages` `role`")):
        list(read_text([path]).documents)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", "not JSON column 2"),
        ('{"text": ', "not JSON column 10"),
        ('{"text": 5}', "'text' 5 text"),
        ('{"text": "a\\u0000b"}', "zero byte at 1"),
        ('{"text": "a\\ud800"}', "surrogate U+D800"),
        ('{"\\u001b[0m": 5}', "'text' \\x1b[0m"),
        (b'{"text": "\xff"}', "0xff UTF-8"),
    ],
)
def test_a_line_without_a_text_is_named_by_its_number(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = written(tmp_path, a__jsonl=b"\n".join([b'{"text": "a"}', b"", line, b'{"text": "b"}'])) / "a.jsonl"
    with pytest.raises(ValueError, match=naming("line 3", message)):
        load_corpus(read_text([path]))
