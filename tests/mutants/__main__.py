"""Says which mutants the tests kill.

python -m tests.mutants                          # all
python -m tests.mutants 3 17                     # those of these numbers
python -m tests.mutants --changed-since REV      # those whose entry, file or tests have changed
python -m tests.mutants --part 2/5               # every fifth, from the second on
python -m tests.mutants --most 40                # a part of at most 40, chosen by the commit
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence

from ..changed import git, part_for
from ..parts import part
from .changed import changed_since
from .judge import verdicts
from .table import MUTANTS


def chosen(numbers: Sequence[int], most: int, commit: str) -> tuple[Sequence[int], str]:
    """Returns the part of the numbers that a commit runs, which has at most `most`, and what to say of the others."""
    said = f"{len(numbers)} mutants"
    if (one := part_for(len(numbers), most, commit)) is None:
        return numbers, said
    taken = of_part(numbers, part(one))
    return taken, f"{said}, of which the {len(taken)} of part {one} run; the others: --part K/N instead of --most"


def of_part(numbers: Sequence[int], one: tuple[int, int]) -> Sequence[int]:
    """Returns every N-th number, from the K-th on."""
    return numbers[one[0] - 1 :: one[1]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Says which mutants the tests kill.")
    parser.add_argument("numbers", nargs="*", type=int, help=f"of mutants, 1 to {len(MUTANTS)}; by default all")
    parser.add_argument("--changed-since", metavar="REV", help="those whose entry, file or tests differ from REV's")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="every N-th of them, from the K-th on")
    parts.add_argument("--most", type=int, metavar="MUTANTS", help="a part of at most MUTANTS, chosen by the commit")
    parser.add_argument(
        "--passed", action="store_true", help="the default tier has passed: run no test without a mutant"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests at the same time; by default 2")
    options = parser.parse_args()
    if options.most is not None and options.most < 1:
        parser.error(f"--most is {options.most}; it must be at least 1")
    numbers = options.numbers or range(1, len(MUTANTS) + 1)
    if options.changed_since:
        changed = changed_since(options.changed_since, MUTANTS)
        numbers = [number for number in numbers if MUTANTS[number - 1] in changed]
    numbers = of_part(numbers, options.part)
    if options.most:
        numbers, said = chosen(numbers, options.most, git("rev-parse", "HEAD"))
        print(said, flush=True)
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    judged = verdicts([MUTANTS[number - 1] for number in numbers], options.jobs, passed=options.passed)
    for number, verdict in zip(numbers, judged, strict=True):
        counts[verdict.kind] += 1
        seconds = time.perf_counter() - start
        print(f"{number:3} {verdict.kind:8} {seconds:5.0f} s  {MUTANTS[number - 1].name}", flush=True)
        print(f"      {verdict.reason[:150]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no mutant")
    return int(counts["killed"] < len(numbers))


if __name__ == "__main__":
    raise SystemExit(main())
