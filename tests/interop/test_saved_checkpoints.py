"""The committed logits of the checkpoints in tests/elsewhere are those that transformers computes of their files."""

from pathlib import Path

import numpy as np
import pytest

_REASON = "not installed; tests/interop/environment.sh makes an environment that has it"
pytest.importorskip("transformers", reason=f"transformers is {_REASON}")
pytest.importorskip("torch", reason=f"torch is {_REASON}")

from .models import read_model  # noqa: E402
from .save_checkpoints import CHECKPOINTS, inputs, logits  # noqa: E402

SAVED = Path(__file__).parents[1] / "elsewhere" / "checkpoints"


def test_every_checkpoint_is_committed():
    assert {folder.name for folder in SAVED.iterdir()} == set(CHECKPOINTS)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_transformers_computes_the_committed_logits_of_the_committed_files(name):
    with np.load(SAVED / name / "logits.npz") as saved:
        given = {"tokens": saved["tokens"], "mask": saved["mask"]}
        wanted = saved["logits"]
    for kind, array in inputs().items():
        np.testing.assert_array_equal(given[kind], array)
    found = logits(read_model(SAVED / name), **given)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    assert np.ptp(wanted[given["mask"]]) > 1
