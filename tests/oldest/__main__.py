"""Runs tests with the oldest supported version of each dependency, in an environment of their own.

python -m tests.oldest                # the tests that pyproject.toml lists as `oldest`
python -m tests.oldest tests/train    # others; all arguments go to pytest
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def lower_bounds(dependencies: list[str]) -> list[str]:
    """Returns the oldest version of each dependency that its lower bound allows, as pip's constraints."""
    bounds = [re.match(r"([\w-]+)>=([\d.]+)", one) for one in dependencies]
    assert all(bounds), f"a dependency has no lower bound: {dependencies}"
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


def main() -> int:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    tests = sys.argv[1:] or project["tool"]["gtp_jax"]["ci"]["oldest"]
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch, "constraints.txt")
        constraints.write_text("\n".join(lower_bounds(project["project"]["dependencies"])))
        venv.create(Path(scratch, "venv"), with_pip=True)
        programs = Path(scratch, "venv", "bin")
        install = [programs / "pip", "install", "--quiet", "--constraint", constraints, "-e", ".[test]"]
        subprocess.run(install, cwd=CHECKOUT, check=True)
        freeze = subprocess.run([programs / "pip", "freeze"], check=True, capture_output=True, text=True).stdout
        print(*re.findall(r"^(?:jax|jaxlib|flax|optax|orbax-checkpoint)==.*", freeze, re.MULTILINE), flush=True)
        return subprocess.run([programs / "pytest", *tests], cwd=CHECKOUT).returncode


if __name__ == "__main__":
    raise SystemExit(main())
