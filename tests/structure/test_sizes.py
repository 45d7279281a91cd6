"""Lines of code are those that do something, and every file of the package is counted once."""

from .sizes import CORE, LIFE_OF_A_WEIGHT, PACKAGE, code_lines, files_by_room, life_of_a_weight

SOURCE = '''"""A docstring
of two lines."""

import os  # a comment beside code


# a comment alone
class One:
    """A docstring."""

    text = """a text
    of two lines"""

    def method(self, x):
        """A docstring."""
        "no docstring"
        return (
            x,
            # a comment within a bracket

            os,
        )
'''


def test_docstrings_comments_and_blank_lines_are_left_out():
    assert code_lines(SOURCE) == 1 + 1 + 2 + 1 + 1 + 4


def test_every_file_is_in_one_room():
    files = [path for room in files_by_room().values() for path in room]
    assert sorted(files) == sorted(PACKAGE.rglob("*.py"))


def test_a_room_is_found_wherever_it_lies(tmp_path):
    for place in ("weights/_a.py", "runner/cli/_b.py", "runner/_c.py", "cli/_bench_d.py", "new/_e.py", "_f.py"):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1")
    rooms = {room: [path.name for path in files] for room, files in files_by_room(tmp_path).items()}
    wanted = {"weights": ["_a.py"], "cli": ["_b.py"], "runner": ["_c.py"], "new": ["_e.py"], ".": ["_f.py"]}
    assert rooms == wanted | {"bench": ["_bench_d.py"]}


def test_the_table_names_rooms_of_the_core_and_finds_files():
    assert set(LIFE_OF_A_WEIGHT) <= set(CORE)
    assert {path.parent.name for path in life_of_a_weight()} >= {"weights"}
