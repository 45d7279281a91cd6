"""Conversations as tokens, and which of these are answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._foreign import brief
from ._chat_template import ChatTemplate
from ._tokens import Tokenizer

MESSAGES = "messages"
_TOOLS = "tools"
# The form of ShareGPT.
_OTHER = "conversations"

# Conversations handed to the tokenizer's threads at a time.
_CHUNK = 256
# Characters of one at most: the tokenizer needs 100 times their memory.
_MAX_CHARACTERS = 1 << 24


class Encoded(NamedTuple):
    """A conversation as tokens.

    Attributes:
        tokens: `(n,)` ids.
        answers: `(n,)` uint8, 1 for tokens of answers and for what ends these.
    """

    tokens: np.ndarray
    answers: np.ndarray


def encoded(
    records: Iterable[tuple[str, Any]], template: ChatTemplate, tokenizer: Tokenizer, *, answers_only: bool
) -> Iterator[Encoded]:
    """Yields conversations as tokens.

    Args:
        records: where each is, for messages, and what is there: an object with `messages`, and perhaps `tools`.
        template: writes them as text.
        tokenizer: of the text.
        answers_only: find the answers; otherwise every token counts as one.

    Raises:
        ValueError: naming the record that is no conversation, has no answer, has the text of a special token in a
            message, or that the template refuses.
    """
    reserved = (*tokenizer.special, template.ending)
    for batch in itertools.batched(records, _CHUNK):
        rendered = []
        for where, record in batch:
            try:
                messages, tools = conversation_of(record)
                _check_reserved(messages, reserved)
                rendered.append((template.conversation if answers_only else template.text)(messages, tools))
                if len(rendered[-1].text) > _MAX_CHARACTERS:
                    raise ValueError(f"it has more than {_MAX_CHARACTERS} characters, which is the most. Shorten it.")
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        for one, (tokens, places) in zip(rendered, tokenizer.marked([one.text for one in rendered]), strict=True):
            mask = np.zeros(len(tokens), np.uint8) if answers_only else np.ones(len(tokens), np.uint8)
            for begin, end in one.answers:
                mask |= (places[:, 0] < end) & (places[:, 1] > begin)
            yield Encoded(tokens, mask)


def conversation_of(record: Any) -> tuple[Sequence[Mapping[str, Any]], Sequence[Any] | None]:
    """Returns the messages of a record, and the tools that it offers.

    Raises:
        ValueError: saying what is missing or has another form.
    """
    if not isinstance(record, dict) or MESSAGES not in record:
        there = f"the fields {', '.join(map(brief, record))}" if isinstance(record, dict) else brief(record)
        convert = "; rename `from` and `value` in it to `role` and `content`" if _OTHER in there else ""
        raise ValueError(f"it has no `{MESSAGES}`, but {there}{convert}. Give each line an object with `{MESSAGES}`.")
    messages, tools = record[MESSAGES], record.get(_TOOLS)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{MESSAGES}` is {brief(messages)}; it must be a list of at least one message.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"turn {number} is {brief(message)}; it must be an object with a `role` and a `content`, such as "
                '{"role": "user", "content": "..."}.'
            )
        content = message.get("content")
        if not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
            raise ValueError(f"the `content` of turn {number} is {brief(content)}; it must be text.")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"`{_TOOLS}` is {brief(tools)}; it must be a list.")
    return messages, tools


def _check_reserved(messages: Sequence[Mapping[str, Any]], reserved: Sequence[str]) -> None:
    """Refuses messages that would end a turn, or begin another one, in their midst.

    Raises:
        ValueError: naming the first.
    """
    for number, message in enumerate(messages, 1):
        for text in _texts(message):
            found = next((token for token in reserved if token in text), "\0" if "\0" in text else None)
            if found is not None:
                raise ValueError(
                    f"turn {number} has {brief(found)} in its text, which separates turns or documents. Leave the line "
                    "out, or write it otherwise."
                )


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a message, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)
