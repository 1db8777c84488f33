"""Fixtures and helpers of the tests of conversions."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import Tables


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path)


def killed_at(moment: int, folder: Path | str, work: Callable[[], object]) -> int | None:
    """Work in a process, and kill it before one of its renames, links and deletions in a folder.

    Returns their number if the process completes.
    """
    context = multiprocessing.get_context("fork")
    count = context.Value("q", 0)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.link") and str(folder) in str(arguments):
            count.value += 1
            if count.value > moment:
                os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        sys.addaudithook(hook)
        work()

    child = context.Process(target=run)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return int(count.value) if child.exitcode == 0 else None
