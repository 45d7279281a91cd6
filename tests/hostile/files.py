"""Hostile files for hypothesis to draw: a good file of each kind with a few things changed, or none at all like it."""

from __future__ import annotations

import copy
import json
import zlib
from typing import Any

from hypothesis import strategies as st

TEXTS = ["", "no", "false", "NaN", "\x1b[2J\x1b]0;owned\x07", "a\nstep 9: whole", "\u202egnp", "\ud800", "x" * 10_000]
PATHS = ["../secret", "/etc/passwd", "/dev/zero", "fifo", "loop", "device", ".", "..", "a/../../b", "model\0", "folder"]
NUMBERS = [-1, 0, 1, 2, 1 << 31, 1 << 63, 1 << 64, 10**8, 10**18, 10**40, 0.5, 1e308, float("nan"), float("inf")]
RAW = [
    b"",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    b"[" * 100_000,
    b'{"a":' * 60_000,
    b"[" * 100 + b"]" * 100,
    b'{"a": 1, "a": 2}',
    b"1" * 5_000,
    b"[" + b"0," * 2_500_000 + b"0]",
    b'"\\ud800"',
    b'{"step":',
]

atoms = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS + PATHS), st.text(max_size=8)
)
values = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
keys = st.sampled_from(TEXTS + PATHS) | st.text(max_size=8)


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value, as the keys that lead to it."""
    children = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


@st.composite
def changed(draw: Any, content: Any) -> Any:
    """A JSON value with one to three places of it replaced, deleted or added to."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(content)))
        if not path:
            if isinstance(content, dict):
                content[draw(keys)] = draw(values)
            continue
        holder = content
        for key in path[:-1]:
            holder = holder[key]
        how = draw(st.sampled_from(["replace", "replace", "delete", "rename"]))
        if how == "replace":
            holder[path[-1]] = draw(values)
        elif how == "delete" or not isinstance(holder, dict):
            del holder[path[-1]]
        else:
            holder[draw(keys)] = holder.pop(path[-1])
    return content


def json_of(content: Any) -> st.SearchStrategy[bytes]:
    """Bytes of a JSON file made of a good one."""
    good = json.dumps(content).encode()
    cut = st.integers(0, len(good)).map(lambda end: good[:end])
    return st.one_of(
        changed(content).map(lambda new: json.dumps(new).encode()),
        changed(content).map(lambda new: json.dumps(new).encode()),
        values.map(lambda new: json.dumps(new).encode()),
        st.sampled_from(RAW),
        cut,
        st.binary(max_size=64),
    )


def sealed(text: bytes) -> bytes:
    """A manifest with the checksum that belongs to it, if it is an object: whoever forges one can do that."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(content, dict):
        return text
    content.pop("crc32", None)
    crc = zlib.crc32(json.dumps(content).encode())
    return json.dumps({**content, "crc32": f"{crc:08x}"}).encode()


def headed(header: bytes, data: bytes) -> bytes:
    """A safetensors file."""
    return len(header).to_bytes(8, "little") + header + data
