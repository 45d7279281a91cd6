"""Two tokenizer.json files are of one tokenizer exactly if all that determines the tokens of a text is the same."""

from __future__ import annotations

import json

import pytest

from gtp_jax.runner.data import same_tokenizer

tokenizers = pytest.importorskip("tokenizers")

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
