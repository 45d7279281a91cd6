"""Without the `tokenizers` package."""

from __future__ import annotations

import subprocess
import sys


def test_missing_package_is_named_with_its_extra(tmp_path):
    # A finder that hides the package, as if it were not installed.
    code = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "tokenizers":
            raise ModuleNotFoundError("No module named 'tokenizers'", name=name)
sys.meta_path.insert(0, Hide())
from gtp_jax.runner.data import load_tokenizer
try:
    load_tokenizer("tokenizer.json")
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs the `tokenizers` package" in done.stdout
    assert 'pip install "gtp_jax[tokenizers]"' in done.stdout
