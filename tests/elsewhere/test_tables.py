"""Parquet files and saved data sets are read as the texts in a column, and what has none is named."""

import pytest
from messages import naming

datasets = pytest.importorskip("datasets", reason='datasets is not installed: pip install "gtp_jax[data]"')

from gtp_jax.runner.data import load_corpus, read_text  # noqa: E402

TEXTS = [f"document {i} of a table" for i in range(300)]


@pytest.fixture
def table():
    return datasets.Dataset.from_dict({"id": list(range(300)), "text": TEXTS})


def test_a_parquet_file_and_a_folder_of_them_hold_the_texts_of_the_column(table, tmp_path):
    for name, rows in {"a": range(200), "b": range(200, 300)}.items():
        table.select(rows).to_parquet(str(tmp_path / f"{name}.parquet"), batch_size=50)
    read = read_text([tmp_path])
    assert read.records and [one.decode() for one in read.documents] == TEXTS
    assert read.documents[203].decode() == TEXTS[203]
    assert len(read_text([tmp_path / "b.parquet"]).documents) == 100


def test_a_saved_data_set_is_read_in_its_order(table, tmp_path):
    shuffled = table.shuffle(seed=1)
    shuffled.save_to_disk(str(tmp_path / "saved"))
    read = read_text([tmp_path / "saved"])
    assert [one.decode() for one in read.documents] == shuffled["text"] != TEXTS
    assert read.documents[7].decode() == shuffled[7]["text"]
    assert load_corpus(read).fingerprint == load_corpus(read_text([tmp_path / "saved"])).fingerprint


def test_what_has_no_text_is_named(table, tmp_path):
    table.to_parquet(str(tmp_path / "a.parquet"))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match=naming("a.parquet 'content' id text --text-field")):
        read_text([tmp_path / "a.parquet"], text_field="content")
    with pytest.raises(ValueError, match=naming("a.parquet row 0 'id'")):
        load_corpus(read_text([tmp_path / "a.parquet"], text_field="id"))
    with pytest.raises(ValueError, match=naming("splits test train splits/test")):
        read_text([tmp_path / "splits"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=naming("b.parquet again")):
        read_text([tmp_path / "b.parquet"])
