"""Numbers and tables as people read them."""

from __future__ import annotations

import pytest

from gtp_jax.hlo._text import alike, columns, quantity


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (4096, "4.10 kB"),
        (33_554_432, "33.6 MB"),
        (999_600, "1.00 MB"),
        (235e6, "235 MB"),
        (0.00123, "1.23 mB"),
        (4.5e-5, "45 µB"),
        (-2500, "-2.50 kB"),
    ],
)
def test_quantity_has_three_digits_and_a_prefix(value, text):
    assert quantity(value, "B") == text


def test_alike_counts_repetitions_in_order():
    assert alike(["b", "a", "b"]) == "2 x b a"


def test_columns_are_aligned_without_trailing_blanks():
    text = columns(("name", "size", ""), [("a", 5, "x"), ("long name", 1234, "")], right=(1,))
    assert text.splitlines() == [
        "name       size",
        "---------  ----  -",
        "a             5  x",
        "long name  1234",
    ]
