"""Count the one-token faults that the tests see.

    python -m tests.mutants                          # all mutants: about an hour on two cores
    python -m tests.mutants order loader/pad-rows    # a package, and one mutant
    python -m tests.mutants --list                   # names, modules and changes

Each mutant of `mutants.py` runs against its tests for at most 60 s, up to the first failure. The
tests of a package are ordered: golden files and oracles first. A line per mutant says which test
killed it. The exit status is 1 if a mutant survives without a reason in the list, or if it could
not be judged. `killed.txt` holds the names of all killed mutants; `--record` updates it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.mutants.mutants import MUTANTS, PACKAGES, Mutant, recorded, write_recorded
from tests.mutants.run import KILLED, SURVIVED, UNJUDGED, Verdict, confirm, judged


def main(words: Sequence[str], mutants: Sequence[Mutant] = MUTANTS) -> int:
    """Run the command and return its exit status. mutants: the list to choose from."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Count the one-token faults that tests see."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants or packages (all)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at once (1)")
    parser.add_argument("--seconds", type=float, default=60, help="limit of each mutant (60)")
    parser.add_argument("--list", action="store_true", help="print the mutants and end")
    parser.add_argument("--record", action="store_true", help="update killed.txt")
    options = parser.parse_args(words)
    chosen = choose(options.names, mutants)
    if not chosen:
        parser.error(f"no mutant and no package is called {' or '.join(options.names)}")
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:36} {mutant.module:32} {mutant.old!r} -> {mutant.new!r}")
        return 0
    first = []
    for verdict in judged(chosen, options.seconds, options.jobs):
        first.append(verdict)
        print(line(verdict), flush=True)
    verdicts = confirm(first, options.seconds, options.jobs)
    for before, after in zip(first, verdicts, strict=True):
        if before != after:
            print(line(after))
    print(summary(verdicts))
    if options.record:
        killed = {verdict.mutant.name for verdict in verdicts if verdict.outcome == KILLED}
        write_recorded(recorded() - {mutant.name for mutant in chosen} | killed)
    return int(any(is_unexplained(verdict) for verdict in verdicts))


def choose(names: Sequence[str], mutants: Sequence[Mutant]) -> list[Mutant]:
    """Return the mutants of these names or packages, or all. Empty if a name is unknown."""
    known = {mutant.name for mutant in mutants} | {mutant.package for mutant in mutants}
    if set(names) - known:
        return []
    return [
        mutant for mutant in mutants if not names or mutant.name in names or mutant.package in names
    ]


def line(verdict: Verdict) -> str:
    """Return the line of one mutant."""
    name = verdict.mutant.name
    if verdict.outcome == KILLED:
        word = "timed out" if verdict.hung else "killed"
        return f"{word:10} {name:36} {verdict.seconds:4.0f} s  {verdict.test}"
    return f"{verdict.outcome:10} {name:36} {verdict.seconds:4.0f} s  {verdict.how}"


def is_unexplained(verdict: Verdict) -> bool:
    """Return whether a mutant was not killed and its list gives no reason."""
    if verdict.outcome == SURVIVED:
        return not verdict.mutant.reason
    return verdict.outcome == UNJUDGED


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the share of killed mutants per package, and every survivor."""
    lines = [""]
    for package in (*PACKAGES, "total"):
        of_package = [item for item in verdicts if package in (item.mutant.package, "total")]
        killed = sum(item.outcome == KILLED for item in of_package)
        if of_package:
            share = 100 * killed / len(of_package)
            lines.append(f"{package:12} {killed:3} of {len(of_package):3} killed  {share:4.0f} %")
    before = recorded()
    for item in verdicts:
        if item.outcome != KILLED:
            reason = item.mutant.reason or "no reason is listed"
            again = " It was killed before." if item.mutant.name in before else ""
            lines.append(f"{item.outcome}: {item.mutant.name}: {reason}.{again}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
