"""A tokenizer may know more tokens than its model, as published ones do: they are kept and named."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import import_llama

from .hugging_face import CONFIG, random_tensors, write_model

VOCAB = {f"t{i}": i for i in range(CONFIG["vocab_size"])}
ADDED = [{"id": 102, "content": "[PAD]", "special": True}]


def as_bytes(content) -> bytes:
    return json.dumps(content).encode()


def imported(folder, files: dict[str, bytes]) -> list[str]:
    """The warnings; the files are kept whatever they are."""
    write_model(folder / "hf", random_tensors(CONFIG), CONFIG)
    for name, content in files.items():
        (folder / "hf" / name).write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import_llama(folder / "hf", folder / "imported")
    assert Checkpoints(folder / "imported", read_only=True).files() == files
    return [str(one.message) for one in caught if one.category is UserWarning]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"tokenizer.json": {"model": {"vocab": VOCAB}, "added_tokens": ADDED}}, "102 ('[PAD]')"),
        ({"tokenizer.json": {"model": {"vocab": VOCAB | {"a\x1b": 102, "b": 300}}}}, "102 ('a\\x1b'), 300 ('b')"),
        ({"tokenizer.json": {"model": {"vocab": [[f"u{i}", -1.0] for i in range(103)]}}}, "102 ('u102')"),
        ({"vocab.json": VOCAB, "added_tokens.json": {"[PAD]": 102}}, "102 ('[PAD]')"),
        ({"vocab.json": {f"t{i}": i for i in range(112)}}, "109 ('t109') and 2 more"),
    ],
    ids=["added", "vocabulary", "unigram", "slow tokenizer", "many"],
)
def test_tokens_that_the_model_lacks_are_named_in_one_warning(tmp_path, files, named):
    [text] = imported(tmp_path, {name: as_bytes(content) for name, content in files.items()})
    assert re.search(naming(f"{tmp_path / 'hf'} 101 {named} `gtp-jax train`"), text)


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"vocab": VOCAB}, "added_tokens": [{"id": 101, "content": "</s>"}]},
        {"model": {"vocab": {"a": "102", "b": 102.0, "c": True, "d": None}}, "added_tokens": {"[PAD]": 102}},
        {"model": {"vocab": 300}, "added_tokens": [102, {}, {"id": "102"}]},
    ],
)
def test_files_without_such_tokens_or_of_another_form_are_kept_without_a_warning(tmp_path, content):
    assert imported(tmp_path, {"tokenizer.json": as_bytes(content)}) == []


def test_where_warnings_are_errors_nothing_is_written(tmp_path):
    write_model(tmp_path / "hf", random_tensors(CONFIG), CONFIG)
    (tmp_path / "hf" / "tokenizer.json").write_bytes(as_bytes({"model": {"vocab": VOCAB}, "added_tokens": ADDED}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match=naming("[PAD] 101")):
            import_llama(tmp_path / "hf", tmp_path / "imported")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
