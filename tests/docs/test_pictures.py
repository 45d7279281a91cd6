"""The pictures of docs/how-it-works.md are drawn from the code, and show all of it."""

import tomllib

import pytest

from docs.pictures.how_it_works import PICTURES, rooms

from .pages import ROOT


def test_every_room_of_the_import_contracts_is_drawn_with_its_lines_and_purpose():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for layer, shown in zip(contracts[0]["layers"], rooms(), strict=True):
        assert [name.strip().removeprefix("gtp_jax.") for name in layer.split("|")] == [name for name, _, _ in shown]
        assert all(lines > 100 and len(purpose) > 10 for _, lines, purpose in shown)


@pytest.mark.full
def test_the_pictures_can_be_drawn_again_and_are_small(tmp_path):
    for name in ("life", "schedule", "rooms"):  # the step compiles for a minute
        PICTURES[name](tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"
    drawn = [ROOT / "docs" / f"how-it-works-{name}.png" for name in PICTURES]
    assert sum(path.stat().st_size for path in drawn) < 300_000
