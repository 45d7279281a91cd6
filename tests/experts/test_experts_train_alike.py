"""The example that trains on text: the loss over ep 4 is that of one device, and either method keeps the load even."""

import dataclasses
import runpy
from pathlib import Path

import numpy as np
import pytest

from gtp_jax.runner.data import BYTES, Text, load_corpus

EXAMPLE = Path(__file__).parents[2] / "examples/05_experts_on_ranks_of_their_own.py"


@pytest.mark.slow
def test_losses_over_ep_4_are_those_of_one_device_and_the_load_stays_even(x64):
    example = runpy.run_path(str(EXAMPLE))
    # not the standard library, which differs from one Python to another
    lines = tuple(f"{i} times {i % 7} is {i * (i % 7)}, and {i} squared {i * i}.\n".encode() * 3 for i in range(400))
    windows = load_corpus(Text("sums", lines, 0), BYTES).rows(64, 0)

    def trained(name: str, ep: int) -> np.ndarray:
        sizes = dict(dtype="float64", num_layers=2, hidden_size=32, intermediate_size=32)
        config, rate = example["SIZES"]["1m"]
        config = dataclasses.replace(config, **sizes, **example[name])
        return np.array(example["train"](config, rate, ep, windows, 60))

    one, four = trained("BALANCE_LOSS", 1), trained("BALANCE_LOSS", 4)
    assert four[-1, 0] < 0.6 * four[0, 0]
    np.testing.assert_allclose(four, one, rtol=1e-10)
    loads = {name: trained(name, 4)[-10:, 1].mean() for name in ("BIASES", "NEITHER")}
    assert max(four[-10:, 1].mean(), loads["BIASES"]) < 0.75 * loads["NEITHER"], (four[-10:, 1].mean(), loads)
