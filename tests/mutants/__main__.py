"""Says which mutants the tests kill.

python -m tests.mutants          # all, in some twenty minutes on two busy cores
python -m tests.mutants 3 17     # those of these numbers
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from .mutant import judge
from .table import MUTANTS

parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Says which mutants the tests kill.")
parser.add_argument("numbers", nargs="*", type=int, help=f"of mutants, 1 to {len(MUTANTS)}; by default all")
numbers = parser.parse_args().numbers or range(1, len(MUTANTS) + 1)
counts: Counter[str] = Counter()
for number in numbers:
    mutant, start = MUTANTS[number - 1], time.perf_counter()
    verdict = judge(mutant)
    counts[verdict.kind] += 1
    seconds = time.perf_counter() - start
    print(f"{number:2} {verdict.kind:8} {seconds:4.0f} s  {mutant.name}\n     {verdict.reason[:150]}", flush=True)
print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
sys.exit(int(counts["killed"] < len(numbers)))
