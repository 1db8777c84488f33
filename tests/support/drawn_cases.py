"""Many random cases in one test: the same ones in every check of a change, others on request.

The error contains the seed of the first case that fails. WDSTRAIN_TEST_DAY, the number of a day
or "today", draws the cases of that day:

    WDSTRAIN_TEST_DAY=today pytest tests/oracle/test_loading.py -m slow
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import date
from pathlib import Path

GIVEN = os.environ.get("WDSTRAIN_TEST_DAY", "739945")
DAY = date.today().toordinal() if GIVEN == "today" else int(GIVEN)


def check_block(check: Callable[[int, Path], object], block: int, size: int, folder: Path) -> None:
    """Run `check(seed, its own folder)` for the `size` seeds of a block of the day.

    Blocks share no seed with each other, with other days, or with the seeds below 1000.
    """
    first = 1000 + (DAY * 100 + block) * size
    for seed in range(first, first + size):
        try:
            case = folder / str(seed)
            case.mkdir(parents=True)
            check(seed, case)
        except BaseException as error:
            error.args = (f"case {seed} of day {DAY}: {error}",)
            raise
