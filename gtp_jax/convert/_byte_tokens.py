"""Describes a model whose tokens are bytes to readers of Hugging Face's files."""

from __future__ import annotations

import json

from ..models import END_TOKEN, TOKENIZER_FILE

# Byte 0 occurs in no text: runs put it after each document.
_END, _END_NAME = 0, "<|endoftext|>"
BYTES_CONFIG = {END_TOKEN: _END}

_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": _END_NAME,
    "clean_up_tokenization_spaces": False,
}


def bytes_files() -> dict[str, bytes]:
    """Returns the contents of a tokenizer.json in which the id of each byte is its value, and of its settings, by name.

    The tokenizer is one of byte pairs without any pair. `tokenizers` and `transformers` read it.
    """
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": _END, "content": _END_NAME, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "BPE", "vocab": {_END_NAME: _END} | {_symbol(byte): byte for byte in range(1, 256)}, "merges": []}
    content = {
        "version": "1.0",
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": model,
    }
    files = {TOKENIZER_FILE: content, "tokenizer_config.json": _SETTINGS}
    return {name: (json.dumps(one, indent=2, ensure_ascii=False) + "\n").encode() for name, one in files.items()}


def _symbol(byte: int) -> str:
    """Returns the character that represents a byte in tokenizers of bytes: itself if it is visible, otherwise one of
    those from U+0100 on, as GPT-2's `bytes_to_unicode` has it."""
    hidden = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)]
    return chr(256 + hidden.index(byte)) if byte in hidden else chr(byte)
