"""Which files are read, in which order, and what is said about those that cannot be."""

from __future__ import annotations

import codecs
import os
import sys
import warnings

import pytest

from gtp_jax.runner.data import read_text, standard_library

from .texts import document, write_documents


def test_standard_library_is_tens_of_megabytes_and_always_the_same():
    first, second = read_text(), standard_library()
    assert first == second
    assert first.bytes > 5e6
    assert all(first.documents)
    assert any(b"class OrderedDict" in text for text in first.documents)


def test_order_does_not_depend_on_where_the_directory_is(tmp_path):
    one = write_documents(tmp_path / "a" / "one")
    two = write_documents(tmp_path / "two")
    assert read_text([one]).documents == read_text([two]).documents


def test_files_come_in_the_order_given(tmp_path):
    for name in "ba":
        (tmp_path / name).write_text(f"text {name}")
    assert read_text([tmp_path / "b", tmp_path / "a"]).documents == (b"text b", b"text a")


def test_hidden_binary_and_installed_files_of_a_directory_are_left_out(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "binary.bin").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("other")
    with pytest.warns(UserWarning, match="2 files in `data` are not UTF-8 text"):
        text = read_text([tmp_path])
    assert text.documents == (b"good",)
    assert text.skipped == 2


def test_files_that_are_left_out_because_they_are_not_utf_8_are_named_with_the_reason(tmp_path):
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "a.txt").write_bytes("caf\u00e9!".encode("latin-1"))
    (tmp_path / "b.txt").write_bytes("text".encode("utf-16"))
    (tmp_path / "c.txt").write_bytes(b"ab\0c")
    (tmp_path / "d\n.txt").write_bytes(b"\xff")
    with pytest.warns(UserWarning) as caught:
        assert read_text([tmp_path]).documents == (b"good",)
    (warning,) = caught
    assert str(warning.message) == (
        f"4 files in `data` are not UTF-8 text and are left out: {tmp_path}/a.txt (byte 0xe9 at 3 is not UTF-8), "
        f"{tmp_path}/b.txt (byte 0xff at 0 is not UTF-8), {tmp_path}/c.txt (a zero byte at 2) and 1 more. To read "
        "those that are text, convert them to UTF-8."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_text([tmp_path / "good.txt"])


def test_directories_of_runs_are_left_out_and_refused_if_given(tmp_path):
    for name in ("a", "run", "z/run"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    with pytest.warns(UserWarning, match=rf"2 directories of runs in `data` are left out, such as {tmp_path}/run: "):
        assert read_text([tmp_path], is_run=lambda path: path.name == "run").documents == (b"a",)
    with pytest.raises(ValueError, match=rf"`data` {tmp_path}/run is the directory of a run, and .*Give a directory"):
        read_text([tmp_path / "run"], is_run=lambda path: path.name == "run")


def test_missing_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"`data` .*nowhere does not exist\. Give a file"):
        read_text([tmp_path / "nowhere"])


def test_unreadable_file_is_named():
    with pytest.raises(ValueError, match=r"`data` /proc/self/mem cannot be read: .*Check its permissions"):
        read_text(["/proc/self/mem"])  # exists, and fails to read even for root


def test_empty_file_and_empty_directory_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"`data` .*empty\.txt: the file is empty"):
        read_text([tmp_path / "empty.txt"])
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"`data` .*none: the directory holds no UTF-8 text \(0 files read"):
        read_text([tmp_path / "none"])


def test_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "x.dat").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"x\.dat is not UTF-8 text"):
        read_text([tmp_path / "x.dat"])


def test_name_says_what_was_read(tmp_path):
    (tmp_path / "a").write_text(document(0))
    (tmp_path / "b").write_text(document(1))
    assert read_text([tmp_path / "a"]).name.endswith("a")
    assert read_text([tmp_path / "a", tmp_path / "b"]).name.endswith("a and 1 more")


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, message in (
        ("fifo", "is a FIFO, but a regular file is expected"),
        ("loop", "cannot be read: it is a link that leads to itself"),
        ("device", "is a device, but a regular file is expected"),
        ("zero\0byte", "cannot be read: embedded null byte"),
    ):
        with pytest.raises(ValueError, match=rf"`data` .*{message}"):
            read_text([tmp_path / name])
    with pytest.raises(ValueError, match=r"directory holds no UTF-8 text \(0 files.*1 links lead out of it"):
        read_text([tmp_path])


def test_links_out_of_a_directory_are_followed_only_if_asked(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    (inside / "a").write_text("a")
    (outside / "b").write_text("b")
    (inside / "again").symlink_to("a")
    (inside / "b").symlink_to(outside / "b")
    (inside / "c").symlink_to(outside)
    (outside / "home").symlink_to(inside)  # a loop of directories
    with pytest.warns(UserWarning, match=r"2 links in `data` lead out .*Follow them with `follow_links`"):
        assert read_text([inside]).documents == (b"a", b"a")
    assert read_text([inside], follow_links=True).documents == (b"a", b"a", b"b", b"b")


def test_json_that_is_not_by_lines_does_not_pass_for_text(tmp_path):
    (tmp_path / "x.json").write_text('[{"text": "a document"}]')
    for path in (tmp_path, tmp_path / "x.json"):
        with pytest.raises(ValueError, match=r"`data` .*x\.json is JSON, which is read only as JSON Lines.*\.jsonl"):
            read_text([path])


def test_source_code_with_json_in_it_is_text(tmp_path):
    (tmp_path / "main.py").write_text("print()")
    (tmp_path / "package.json").write_text("{}")
    assert read_text([tmp_path]).documents == (b"print()", b"{}")


def test_records_among_text_are_left_out_with_a_warning(tmp_path):
    (tmp_path / "README.md").write_text("read me, it is more than the records")
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.warns(UserWarning, match=r"1 files of records in directories of text are left out: .*train\.jsonl\."):
        text = read_text([tmp_path])
    assert len(text.documents) == 1 and text.unread == ("1 files of records",)


def test_text_among_records_is_left_out_with_a_warning(tmp_path):
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "train.jsonl").write_text('{"text": "more than the text"}')
    (tmp_path / "tokens.bin").write_bytes(bytes(100))
    with pytest.warns(UserWarning, match=r"1 other files in directories of records are left out: .*README\.md\."):
        text = read_text([tmp_path])
    assert list(text.documents) == [b"more than the text"] and text.token_files == (tmp_path / "tokens.bin",)


def test_json_that_is_most_of_a_directory_is_named_in_a_warning_and_a_little_is_not(tmp_path):
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "train.json").write_text('["a long record"]')
    with pytest.warns(UserWarning, match=r"1 of the 2 files in `data` directory .* such as train\.json, and have most"):
        read_text([tmp_path])
    (tmp_path / "book.txt").write_text("a text that is longer than the record" * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_text([tmp_path]).documents) == 3


def test_a_link_to_a_file_of_records_is_read_like_the_file(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "of a record"}')
    (tmp_path / "train.txt").symlink_to(tmp_path / "train.jsonl")
    assert list(read_text([tmp_path / "train.txt"]).documents) == [b"of a record"]


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_no_part_of_its_text(tmp_path):
    mark = codecs.BOM_UTF8
    for name, content in {"a.txt": mark + b"one", "b.txt": b"two" + mark, "c.txt": mark}.items():
        (tmp_path / name).write_bytes(content)
    text = read_text([tmp_path])
    assert text.documents == (b"one", b"two" + mark)
    assert read_text([tmp_path / "a.txt", tmp_path / "b.txt"]).documents == text.documents
    with pytest.raises(ValueError, match=r"c\.txt: the file is empty"):
        read_text([tmp_path / "c.txt"])


def test_tables_need_a_package_which_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").touch()
    (tmp_path / "saved").mkdir()
    for name in ("dataset_info.json", "state.json"):
        (tmp_path / "saved" / name).touch()
    for path in (tmp_path / "a.parquet", tmp_path / "saved"):
        needed = rf'{path} needs the `datasets` package: `pip install "gtp_jax\[data\]"`'
        with pytest.raises(ModuleNotFoundError, match=needed):
            read_text([path])
