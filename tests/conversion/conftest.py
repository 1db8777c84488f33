"""Fixtures of the tests of conversions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tables import Tables


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path)
