"""What a message must name: the argument, what came, the remedy. How it says so is left to whoever writes it."""

from __future__ import annotations

import re

# What stands in backticks, in quotes, or in brackets, with what adjoins it, or a word.
_PART = re.compile(
    r"""(?: `[^`]*`
          | (?<![A-Za-z0-9])'[^']*' | (?<![A-Za-z0-9])"[^"]*"
          | \([^()]*\) | \[[^\[\]]*\] | \{[^{}]*\}
          | \S )+""",
    re.VERBOSE,
)


def naming(*parts: str) -> str:
    """Returns a pattern, for `match=` of `pytest.raises` and `pytest.warns`, of texts that contain every part.

    The parts may come in any order, and whatever may stand between them, over any number of lines.

        with pytest.raises(ValueError, match=naming("`num_heads` 4", "`num_kv_heads` 3")):

    Args:
        parts: what the message must name, character by character. One string may hold several, with spaces between
            them: "`num_heads` 4 `num_kv_heads` 3" is four parts. Spaces within backticks, quotes, or brackets do not
            separate. A part does not match within a longer word, number, or flag.

    Raises:
        ValueError: if there is no part, so that every message would do.
    """
    found = [part for text in parts for part in _PART.findall(text)]
    if not found:
        raise ValueError(f"{parts} names nothing; say what the message must name")
    return "(?s)" + "".join(f"(?=.*{_whole(part)})" for part in found)


def _whole(part: str) -> str:
    """Returns the pattern of a part that is not within a longer word, number, or flag."""
    before = after = ""
    if part[0].isalnum() or re.match(r"-\w", part):
        before = r"(?<!\w)"
    if part[0].isdigit():
        before += r"(?<!\d[.,])(?<!\W-)"
    if part[-1].isalnum():
        after = r"(?![\w-])" if part.startswith("--") else r"(?!\w)"
    if part[-1].isdigit():
        after += r"(?![.,]\d)"
    return f"{before}{re.escape(part)}{after}"
