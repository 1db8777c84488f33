"""Results of calls that may be right, or refused with an error that names the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import wdstrain as wt

T = TypeVar("T")


def result_or_refusal(call: Callable[[], T]) -> T | str:
    """Return the result of a call, or the text of an error of the package.

    For promises that leave a decision open: `assert outcome == right or "option" in outcome`.
    Paths in the text have no folders, because pytest names folders after tests.
    """
    try:
        return call()
    except wt.WdstrainError as error:
        return re.sub(r"/\S*/", "", str(error))
