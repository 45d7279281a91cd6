"""Checkpoints of Tunix's families, written once."""

import pytest

from .families import FAMILIES, write


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """A family, and the folder of a checkpoint of random weights."""
    family = FAMILIES[request.param]
    return family, write(family, tmp_path_factory.mktemp(family.package))
