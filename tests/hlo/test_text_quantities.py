"""Numbers and tables as people read them."""

from __future__ import annotations

from gtp_jax.hlo._text import alike, columns, quantity


def test_quantity_has_three_digits_and_a_prefix():
    values = 0, 999, 1000, 4096, 33_554_432, 999_600, 235e6, 0.00123, 4.5e-5, -2500
    texts = "0 B|999 B|1 kB|4.10 kB|33.6 MB|1.00 MB|235 MB|1.23 mB|45 µB|-2.50 kB".split("|")
    assert [quantity(value, "B") for value in values] == texts


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
