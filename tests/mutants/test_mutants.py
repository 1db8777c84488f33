"""The list of mutants fits the package, and the command that runs them tells killed from survived."""

from __future__ import annotations

import re
import subprocess
import sys
from difflib import SequenceMatcher
from itertools import pairwise

import pytest

from tests.conftest import ROOT
from tests.mutants.mutants import MUTANTS, PACKAGES, TESTS, Mutant

SHARP = (  # killed by tests that run first
    "order/shards-each-epoch",
    "shards/zero-is-false",
    "decode/mask-flip",
    "loader/source-edge",
    "training/no-decay-of-vectors",
)
EQUIVALENT = """if True:
    import sys
    from tests.mutants.__main__ import main
    from tests.mutants.mutants import Mutant
    comment = "# version of the order;"
    mutant = Mutant("order/comment", "order/plan.py", comment, "# number of the order;")
    sys.exit(main(["order/comment", "--seconds", "8"], [mutant]))
"""


def source_of(mutant: Mutant) -> str:
    return (ROOT / "wdstrain" / mutant.module).read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_mutant_changes_one_place_and_compiles(package: str) -> None:
    mutants = [mutant for mutant in MUTANTS if mutant.package == package]
    assert mutants
    for mutant in mutants:
        source = source_of(mutant)
        assert source.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} is not there once"
        compile(source.replace(mutant.old, mutant.new), mutant.module, "exec")


def test_a_mutant_is_a_small_change() -> None:
    """One word or sign differs, or the few that drop a word of a key or a condition."""
    for mutant in MUTANTS:
        old, new = (re.findall(r"\w+|[^\w\s]", text) for text in (mutant.old, mutant.new))
        blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        changed = max(len(old), len(new)) - sum(block.size for block in blocks)
        assert 1 <= changed <= 7, f"{mutant.name} changes {changed} words"


def test_names_are_different_and_ordered_by_package() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    places = [PACKAGES.index(mutant.package) for mutant in MUTANTS]
    assert all(before <= after for before, after in pairwise(places))


def test_the_tests_of_every_package_exist() -> None:
    names = {name for tests in TESTS.values() for name in tests}
    names |= {name for mutant in MUTANTS for name in mutant.tests}
    for name in sorted(names):
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), f"there is no {path}"
        if function:
            assert f"def {function}(" in (ROOT / path).read_text(), f"there is no test {name}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faults_are_killed() -> None:
    command = [sys.executable, "-m", "tests.mutants", *SHARP, "--seconds", "100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^total +{len(SHARP)} of +{len(SHARP)} killed", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_change_that_changes_nothing_survives() -> None:
    command = [sys.executable, "-c", EQUIVALENT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^survived +order/comment", done.stdout, re.MULTILINE)
    assert re.search(r"^total +0 of +1 killed", done.stdout, re.MULTILINE)
