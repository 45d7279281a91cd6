"""Keeps the files that come with a Hugging Face model's weights: config.json, tokenizer files, chat templates and
defaults for generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

# The keys in a checkpoint's `extra`; the second is absent unless every byte is a token.
_CONFIG, _TOKENS = "hugging_face", "tokens"
_BYTES = "bytes"

# The suffix of config.json's fields that hold token ids.
_ID = "_token_id"

TOKENIZER_FILE = "tokenizer.json"
# The field of config.json, and of generation_config.json, with the tokens that end a text.
END_TOKEN = "eos_token_id"
# The field of config.json with the number of positions that the model may use.
POSITIONS = "max_position_embeddings"
_GENERATION_FILE = "generation_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
_OLD_CHAT_TEMPLATE_FILE = "chat_template.json"  # of older releases of transformers
# Files whose meaning depends on the vocabulary: tokenizer files, and defaults for generation, which name tokens by id.
ORIGIN_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    CHAT_TEMPLATE_FILE,
    _OLD_CHAT_TEMPLATE_FILE,
    _GENERATION_FILE,
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The Hugging Face model that a checkpoint comes from, and the tokenizer that it was trained with.

    Attributes:
        config: the content of its config.json.
        files: the contents of its other files, by name; only those in `ORIGIN_FILES`.
        of_bytes: whether the model was trained on bytes, each of which is a token.
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    of_bytes: bool = False

    @classmethod
    def of(cls, extra: Mapping[str, Any], files: Mapping[str, bytes], where: str) -> Self:
        """Returns the origin that a checkpoint was saved with.

        Args:
            extra: the `extra` that the checkpoint was saved with.
            files: the checkpoint's files.
            where: the checkpoint's name, for messages.

        Raises:
            ValueError: if `extra` holds something other than the content of a config.json.
        """
        config = extra.get(_CONFIG, {})
        if not isinstance(config, Mapping):
            raise ValueError(
                f"{where} holds a {type(config).__name__} as `{_CONFIG}`; the object of a config.json is expected. "
                "Import the model again."
            )
        kept = {name: files[name] for name in ORIGIN_FILES if name in files}
        return cls(config, kept, extra.get(_TOKENS) == _BYTES)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a file with a tokenizer or with a part of one, such as the token ids in a
        `tokenizer_config.json`: any file other than defaults for generation and chat templates."""
        return bool(self.files.keys() - {_GENERATION_FILE, CHAT_TEMPLATE_FILE, _OLD_CHAT_TEMPLATE_FILE})

    def extra(self) -> dict[str, Any]:
        """Returns the fields to save in a checkpoint's `extra`; `files` are saved as files."""
        config = {_CONFIG: dict(self.config)} if self.config else {}
        return {**config, _TOKENS: _BYTES} if self.of_bytes else config

    def with_file(self, name: str, content: bytes) -> Self:
        """Returns this origin with a file of `ORIGIN_FILES` added, which replaces one of the same name."""
        return dataclasses.replace(self, files={**self.files, name: content})

    def with_bytes(self, of_bytes: bool) -> Self:
        """Returns this origin for a model that is trained on bytes, or on other tokens."""
        return dataclasses.replace(self, of_bytes=of_bytes)

    def without_tokenizer(self) -> Self:
        """Returns the origin of a model that was trained with another tokenizer: without files and token ids."""
        ids = {name: None for name in self.config if name.endswith(_ID)}
        return dataclasses.replace(self, config={**self.config, **ids}, files={})
