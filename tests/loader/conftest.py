"""The set of pictures that tests of loaders share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_picture_shards


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 23 and 37 pictures of ten classes."""
    return write_picture_shards(tmp_path_factory.mktemp("photos"), [23, 37])
