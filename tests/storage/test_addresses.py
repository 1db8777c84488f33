"""Addresses name shards, whatever their query holds."""

from __future__ import annotations

from pathlib import Path

import pytest

import wdstrain as wt
from tests.conftest import write_shards
from tests.support.servers import serving

NAMED = "?token=1&filename=part-000.tar"


@pytest.mark.parametrize(
    "rest",
    [
        "part-000.tar?token=1",
        "part-000.tar?name=a*b[1]",
        "part-000.tar#part.tar",
        "part-{000..001}.tar?token=1",
        "index.json?token=1&filename=index.json",
        f"part-000.tar{NAMED}",
        "part-000.tar?a=.tar",
        f"part-{{000..001}}.tar{NAMED}",
        "part-000.tar?response-content-disposition=attachment%3B%20filename%3Dpart-000.tar",
    ],
)
def test_a_query_is_no_pattern(rest: str, tmp_path: Path) -> None:
    """Signed addresses and download links often end with the name of the file."""
    wt.index(write_shards(tmp_path, [7, 13]))
    with serving(tmp_path) as served:
        expected = 20 if "{" in rest or "json" in rest else 7
        assert len(wt.open(f"{served.url}/{rest}")) == expected


def test_a_stream_takes_an_address_whose_query_ends_as_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    write_shards(tmp_path, [7])
    with serving(tmp_path) as served:
        stream = wt.WebDataset(f"{served.url}/part-000.tar{NAMED}", shardshuffle=False)
        assert len(list(stream)) == 7
