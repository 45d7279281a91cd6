"""`same_code` tells changed prose from changed code."""

import pytest

from .same_code import differences

BEFORE = '''
def f(x, kind="fp8"):
    """Returns twice x."""
    # doubled
    if kind != "fp8":
        raise ValueError(f"{kind} came where {x} is; pass fp8")
    return 2 * x
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Returns twice x.", "Doubles x."),
        ("# doubled", "# another remark"),
        ('f"{kind} came where {x} is; pass fp8"', 'f"at {x}: pass fp8 for {kind}"'),
    ],
)
def test_changed_prose_is_no_difference(old, new):
    assert differences(BEFORE, BEFORE.replace(old, new)) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("2 * x", "3 * x", ["code"]),
        ('kind="fp8"', 'kind="mxfp8"', ["-'fp8'", "+'mxfp8'"]),
        ("{x} is", "{kind} is", ["code"]),
        ('    """Returns twice x."""\n', "", ["code"]),
    ],
)
def test_changed_code_is_a_difference(old, new, found):
    assert differences(BEFORE, BEFORE.replace(old, new)) == found
