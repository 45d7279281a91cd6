"""Turns conversations into tokens, and marks which of these are answers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._foreign import brief
from ._chat_template import ChatTemplate, Rendered
from ._documents import Documents
from ._lines import JsonLines
from ._tokens import Tokenizer

MESSAGES = "messages"
_TOOLS = "tools"

# The number of conversations handed to the tokenizer's threads at a time.
_CHUNK = 256
# The maximum number of characters per conversation: the tokenizer needs 100 times their memory.
_MAX_CHARACTERS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Chat:
    """Turns conversations into tokens.

    Attributes:
        template: the chat template that writes a conversation as text.
        tokenizer: the tokenizer of that text.
        answers_only: whether the loss counts only the answers, instead of the whole text.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    answers_only: bool

    def document(self, record: Mapping[str, Any]) -> bytes:
        """Returns a conversation as text, a document for `documents`. With `answers_only`, includes the positions of
        its answers.

        Args:
            record: an object with `messages` and optionally `tools`.

        Raises:
            ValueError: if the record is not a conversation, is too long or cannot be encoded, has the text of a special
                token in a message, or is refused by the template; with `answers_only`, also if it has no answer.
        """
        messages, tools = conversation_of(record)
        self._check_reserved(messages, tools)
        found = (self.template.conversation if self.answers_only else self.template.text)(messages, tools)
        if len(found.text) > _MAX_CHARACTERS:
            raise ValueError(f"it has more than {_MAX_CHARACTERS} characters, the maximum. Leave it out.")
        try:
            found.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it has a lone surrogate, U+{ord(found.text[error.start]):04X}. Correct it.") from error
        return json.dumps(found).encode()

    def read(self, files: Iterable[Path]) -> list[bytes]:
        """Returns the conversations in JSON Lines files, as documents for `documents`.

        Raises:
            ValueError: for the same reasons as `document`; the message names the file and the line.
        """
        return [one for file in files for one in JsonLines(file, self.document)]

    def documents(self, conversations: Iterable[bytes]) -> Documents:
        """Returns the tokens of conversations, each ending with the separator, and which of them are answers."""
        tokens, masks = [], []
        for batch in itertools.batched(conversations, _CHUNK):
            rendered = [Rendered(*json.loads(one)) for one in batch]
            for one, (ids, places) in zip(rendered, self.tokenizer.marked([r.text for r in rendered]), strict=True):
                ended = len(ids) > 0 and ids[-1] == self.tokenizer.separator  # the template wrote it
                tokens.append(ids if ended else np.append(ids, self.tokenizer.separator))
                mask = _within(places, one.answers).astype(np.uint8)
                masks.append(mask if ended else np.append(mask, np.uint8(0)))
        return Documents.of(tokens, self.tokenizer.dtype, masks if self.answers_only else None)

    def bytes_of(self, conversations: Iterable[bytes]) -> int:
        """Returns the size in bytes of the text that the loss counts."""
        found = (Rendered(*json.loads(one)) for one in conversations)
        parts = ([r.text[begin:end] for begin, end in r.answers] if self.answers_only else [r.text] for r in found)
        return sum(len(text.encode()) for texts in parts for text in texts)

    def prompt(self, question: str) -> list[int]:
        """Returns the tokens of a question, up to where its answer begins.

        Raises:
            ValueError: if the question has the text of a special token, or the template refuses it.
        """
        messages = [{"role": "user", "content": question}]
        self._check_reserved(messages)
        ((tokens, _),) = self.tokenizer.marked([self.template.prompt(messages)])
        return tokens.tolist()

    @property
    def ends(self) -> list[int]:
        """The special token that ends an answer; empty if answers end with other text."""
        ending = self.template.ending.lstrip()
        return [token for text, token in self.tokenizer.special.items() if ending.startswith(text)]

    @functools.cached_property
    def _control(self) -> tuple[str, ...]:
        """Added tokens that are not special, but with which the template separates turns.

        A pair such as `<think>` and `</think>` marks a part of a message, in which authors write it themselves. White
        space and words, which some vocabularies also have as added tokens, are text.
        """
        added = self.tokenizer.added
        return tuple(
            token
            for token in added
            if token in self.template.around
            and not (f"</{token[1:]}" in added or token.startswith("</"))
            and not (token.isspace() or token.strip().isalnum())
        )

    def _check_reserved(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> None:
        """Refuses messages and tools whose text would end a turn or begin another one.

        Raises:
            ValueError: for the first such message, which it names.
        """
        reserved = (*self.tokenizer.special, *self._control, self.template.ending, "\0")
        for name, part in [*((f"turn {number}", one) for number, one in enumerate(messages, 1)), ("`tools`", tools)]:
            for text in _texts(part):
                if found := next((token for token in reserved if token in text), None):
                    raise ValueError(
                        f"{name} has {brief(found)} in its text, which separates turns or documents. Write it "
                        "differently, or leave it out."
                    )


def holds_conversations(path: Path, text_field: str) -> bool:
    """Returns whether a JSON Lines file holds conversations for `Chat`.

    It does if its first record has `messages`, and either has no `text_field` or `text_field` is `messages`.

    Args:
        path: the path of the file.
        text_field: the name of the field that holds the text of a record.

    Raises:
        ValueError: if the file cannot be read.
    """

    def is_one(record: Mapping[str, Any]) -> bytes:
        return b"1" if MESSAGES in record and (text_field == MESSAGES or text_field not in record) else b""

    lines = JsonLines(path, is_one)
    return len(lines) > 0 and bool(lines[0])


def conversation_of(record: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], Sequence[Any] | None]:
    """Returns the messages of a record, and the tools that it offers.

    Raises:
        ValueError: if something is missing or has the wrong form; the message names it.
    """
    if MESSAGES not in record:
        raise ValueError(f"it has {', '.join(map(brief, record))}, but no `{MESSAGES}`. Give every line `{MESSAGES}`.")
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


def _within(places: np.ndarray, spans: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns whether each token overlaps a span, `(tokens,)` bool.

    Args:
        places: `(tokens, 2)`, the first character of each token and the one after its last.
        spans: the first character of each span and the one after its last, in ascending order.
    """
    begins, ends = np.asarray(spans, np.int64).reshape(-1, 2).T
    # the last of the spans that begin before a token's end
    last = np.searchsorted(begins, places[:, 1], side="left") - 1
    return (last >= 0) & (places[:, 0] < np.append(ends, 0)[last])


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts in a message, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _texts(child)
