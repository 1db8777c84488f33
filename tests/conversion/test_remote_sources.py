"""Shards on a server as a source: few requests, and only for the samples that are packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.support.servers import serving

MEGABYTES = 40  # more than a conversion reads at once
MOST_REQUESTS = 3  # for the size, the bytes, and once more after a broken connection


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    samples = ({"__key__": f"k{n:02d}", "bin": bytes([n]) * 1_000_000} for n in range(MEGABYTES))
    wt.pack(samples, folder, shuffle=False)
    return folder


@pytest.fixture
def requests(packed: Path, tmp_path: Path) -> Callable[..., int]:
    """Return a function that converts the remote set and counts the requests for its shard."""

    def convert(count: int, **options: Any) -> int:
        with serving(packed) as served:
            index = wt.convert_tars(f"{served.url}/index.json", tmp_path / "out", **options)
            assert len(index) == count
            return sum(path.endswith(".tar") for path, _ in served.requests)

    return convert


def test_a_remote_shard_is_not_requested_once_for_every_few_megabytes(
    requests: Callable[..., int],
) -> None:
    assert requests(MEGABYTES) <= MOST_REQUESTS


def test_one_sample_by_a_condition_takes_one_request(requests: Callable[..., int]) -> None:
    assert requests(1, where="key == 'k03'") <= MOST_REQUESTS


def test_one_sample_by_its_key_takes_no_more_requests_than_by_a_condition(
    requests: Callable[..., int], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("k03\n")
    assert requests(1, keys=str(tmp_path / "keys")) <= MOST_REQUESTS
