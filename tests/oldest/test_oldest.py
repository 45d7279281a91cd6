"""Every dependency states the oldest version that is tested."""

import tomllib

import pytest

from .__main__ import CHECKOUT, lower_bounds


def test_every_dependency_has_a_lower_bound():
    dependencies = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert len(lower_bounds(dependencies)) == len(dependencies)
    assert lower_bounds(["jax>=0.11.2,<0.13", "orbax-checkpoint>=0.12.4"]) == [
        "jax==0.11.2",
        "orbax-checkpoint==0.12.4",
    ]
    with pytest.raises(AssertionError, match="no lower bound"):
        lower_bounds(["jax"])
