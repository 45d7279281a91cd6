"""The table of formats says what the number formats are, and what they cost."""

import ml_dtypes
import numpy as np
import pytest

from gtp_jax.formats import ELEMENTS, FORMATS

# Megatron-LM's documentation of the feature gives 1 + 1/32 for MXFP8 and 0.5 + 1/16 for 1-D NVFP4; a 16 x 16 tile
# has one scale here, which is never replicated.
BYTES = {
    "NVFP4": 0.5 + 1 / 256,
    "NVFP4_1D": 0.5 + 1 / 16,
    "MXFP8": 1 + 1 / 32,
    "FP8_E4M3": 1,
    "FP8_E5M2": 1,
}
DTYPES = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def test_bytes_per_element():
    assert {name: format.bytes_per_element for name, format in FORMATS.items()} == BYTES


def test_codes_number_the_formats_in_order_and_names_are_keys_and_what_is_printed():
    assert [format.code for format in FORMATS.values()] == list(range(len(FORMATS)))
    assert all(format.name == name == str(format) for name, format in FORMATS.items())


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_are_those_of_ml_dtypes(name):
    element, facts = ELEMENTS[name], ml_dtypes.finfo(DTYPES[name])
    assert element.max == float(facts.max)
    assert element.mantissa_bits == facts.nmant
    assert 2.0**element.min_exponent == float(facts.smallest_normal)
    assert 2.0 ** (element.min_exponent - element.mantissa_bits) == float(facts.smallest_subnormal)
    assert element.bits == facts.bits


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
def test_facts_of_a_format_agree_with_each_other(format):
    element = ELEMENTS[format.element]
    assert (format.element_max, format.element_bits) == (element.max, element.bits)
    assert (format.block is None) == (format.scale is None)
    assert format.alignment % (format.block or (1, 1))[0] == 0
    assert format.scale_max == (448 if format.scale == "e4m3" else None)
    assert np.lcm(format.alignment, (format.block or (1, 16))[1]) == format.alignment, (
        "a column-wise block fits a slice"
    )
