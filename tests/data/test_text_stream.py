"""Text of tokens that come a few at a time: what is given is never taken back, and in the end it is all."""

import numpy as np
import pytest
from messages import naming

from gtp_jax.runner.data import BYTES, TextStream, read_tokenizer

TEXT = "naïve – 日本語 😀 end"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_of_characters_wait_for_the_rest(size):
    data = list(TEXT.encode())
    stream = TextStream(BYTES, list("é ".encode()))
    given = [stream.add(data[i : i + size]) for i in range(0, len(data), size)]
    assert "".join(given) + stream.end() == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in given)


def test_bytes_that_are_no_character_come_at_the_end():
    stream = TextStream(BYTES, [])
    assert stream.add([65, 0xE2, 0x82]) == "A" and stream.end() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_a_text_to_stop_at_ends_it_and_is_left_out(size):
    data = list(b"one two\n\nthree\n\nfour")
    stream = TextStream(BYTES, list(b"zero\n"), ["four", "\n\nth"])
    given = ""
    for i in range(0, len(data), size):
        given += stream.add(data[i : i + size])
        assert "one two".startswith(given)
        if stream.ended:
            break
    assert stream.ended and given + stream.end() == "one two"


def test_a_text_to_stop_at_is_not_empty():
    with pytest.raises(ValueError, match=naming("`stop` ['a', '']")):
        TextStream(BYTES, [], ["a", ""])


def test_what_looked_like_the_beginning_of_a_stop_is_given_later():
    stream = TextStream(BYTES, [], ["\n\n"])
    assert [stream.add(b"a\n"), stream.add(b"b"), stream.end()] == ["a", "\nb", ""]


def test_a_published_tokenizer_begins_texts_as_it_says_and_joins_words():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "</s>": 1, "▁the": 2, "▁sky": 3, "is": 4, "▁": 5, "?": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = read_tokenizer(made.to_str().encode(), "a model")
    assert tokenizer.published("the sky") == [0, 2, 3]
    assert tokenizer.prompt("the sky") == [2, 3]
    assert tokenizer.prompt("") == [tokenizer.separator] == [1]
    assert tokenizer.published("the</s>") == [0, 2, 1]
    stream = TextStream(tokenizer, [0, 2])
    assert stream.add(np.array([3])) + stream.add([3, 99]) + stream.end() == " sky sky\N{REPLACEMENT CHARACTER}"
    (apart,) = tokenizer.encode([b"the </s>"])
    assert 1 not in apart  # a document holds no separator, before and after a prompt was read
