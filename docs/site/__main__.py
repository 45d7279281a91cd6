"""Builds the site of the documentation into build/site.

    pip install -e '.[docs]' && python -m docs.site

Fails if a link leads nowhere.
"""

import shutil
import subprocess
import sys

from .pages import ROOT, write

folder, site = ROOT / "build" / "pages", ROOT / "build" / "site"
write(folder)
command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
built = subprocess.run(command, cwd=ROOT)
if built.returncode == 0:  # Markdown next to the pages, for readers of llms.txt
    shutil.copytree(folder, site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("api", "*.png"))
    print(f"the site is in {site.relative_to(ROOT)}")
sys.exit(built.returncode)
