"""The cells of every notebook run, one after another, and print what the notebook shows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# Runs a notebook, as Jupyter would, and prints a list of what each cell printed.
_RUN = """
import contextlib, io, json, sys
said, scope = [], {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec("".join(cell["source"]), scope)
        said.append(out.getvalue())
print(json.dumps(said))
"""


def printed(text):
    """Returns what a cell printed without numbers, of which the last digits depend on the machine."""
    return "".join(c for c in text if not c.isdigit())


@pytest.mark.full
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda one: one.stem)
def test_a_notebook_prints_what_it_shows(notebook):
    done = subprocess.run([sys.executable, "-c", _RUN, str(notebook)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = ["".join(line for out in cell["outputs"] for line in out["text"]) for cell in cells]
    assert list(map(printed, json.loads(done.stdout.splitlines()[-1]))) == list(map(printed, shown))


def test_there_are_notebooks_and_each_has_a_title():
    assert len(NOTEBOOKS) >= 3
    for notebook in NOTEBOOKS:
        first, *_ = json.loads(notebook.read_text())["cells"]
        assert first["cell_type"] == "markdown" and first["source"][0].startswith("# ")
