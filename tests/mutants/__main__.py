"""Says which mutants the tests kill.

python -m tests.mutants                          # all
python -m tests.mutants 3 17                     # those of these numbers
python -m tests.mutants --changed-since REV      # those whose entry, file or tests have changed
python -m tests.mutants --part 2/5               # every fifth, from the second on
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from ..parts import part
from .changed import changed_since
from .judge import verdicts
from .table import MUTANTS

parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Says which mutants the tests kill.")
parser.add_argument("numbers", nargs="*", type=int, help=f"of mutants, 1 to {len(MUTANTS)}; by default all")
parser.add_argument("--changed-since", metavar="REV", help="only those whose entry, file or tests differ from REV's")
parser.add_argument(
    "--part", type=part, default=(1, 1), metavar="K/N", help="only every N-th of them, from the K-th on"
)
parser.add_argument("--passed", action="store_true", help="the default tier has passed: run no test without a mutant")
parser.add_argument("--jobs", type=int, default=2, help="processes that run tests at the same time; by default 2")
options = parser.parse_args()
numbers = options.numbers or range(1, len(MUTANTS) + 1)
if options.changed_since:
    changed = changed_since(options.changed_since, MUTANTS)
    numbers = [number for number in numbers if MUTANTS[number - 1] in changed]
numbers = numbers[options.part[0] - 1 :: options.part[1]]
counts: Counter[str] = Counter()
start = time.perf_counter()
for number, verdict in zip(
    numbers, verdicts([MUTANTS[n - 1] for n in numbers], options.jobs, passed=options.passed), strict=True
):
    counts[verdict.kind] += 1
    seconds = time.perf_counter() - start
    print(f"{number:3} {verdict.kind:8} {seconds:5.0f} s  {MUTANTS[number - 1].name}", flush=True)
    print(f"      {verdict.reason[:150]}", flush=True)
print(", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no mutant")
sys.exit(int(counts["killed"] < len(numbers)))
