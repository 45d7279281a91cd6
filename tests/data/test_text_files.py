"""Which files are read, in which order, and what is said about those that cannot be."""

from __future__ import annotations

import pytest

from gtp_jax.data import read_text, standard_library

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
    text = read_text([tmp_path])
    assert text.documents == (b"good",)
    assert text.skipped == 2


def test_missing_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"`data` .*nowhere does not exist\. Give a text file"):
        read_text([tmp_path / "nowhere"])


def test_unreadable_file_is_named():
    with pytest.raises(ValueError, match=r"`data` /proc/self/mem cannot be read: .*Check its permissions"):
        read_text(["/proc/self/mem"])  # exists, and fails to read even for root


def test_empty_file_and_empty_directory_are_named(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"`data` .*empty\.txt: the file is empty"):
        read_text([tmp_path / "empty.txt"])
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"`data` .*none: the directory holds no UTF-8 text \(0 files looked at"):
        read_text([tmp_path / "none"])


def test_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"x\.bin is not UTF-8 text"):
        read_text([tmp_path / "x.bin"])


def test_name_says_what_was_read(tmp_path):
    (tmp_path / "a").write_text(document(0))
    (tmp_path / "b").write_text(document(1))
    assert read_text([tmp_path / "a"]).name.endswith("a")
    assert read_text([tmp_path / "a", tmp_path / "b"]).name.endswith("a and 1 more")
