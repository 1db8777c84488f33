"""Data sets on the Hugging Face Hub: tables are converted, shards are read in place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

import wdstrain as wt
from tests.conftest import picture, read_with_webdataset
from tests.support.hub import TOKEN, Hub, serving_hub
from tests.support.readers import by_key
from wdstrain.cli.main import main
from wdstrain.errors import StorageError, UsageError

_FEATURES = {"label": {"names": ["cat", "dog", "owl"], "_type": "ClassLabel"}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Files of a data set: Parquet in train, validation and test, shards, and a README."""
    root = tmp_path / "set"
    (root / "data").mkdir(parents=True)
    metadata = {"huggingface": json.dumps({"info": {"features": _FEATURES}})}
    for split, first in (("train", 0), ("train", 4), ("validation", 8), ("test", 10)):
        numbers = range(first, first + (4 if split == "train" else 2))
        images = [{"bytes": picture(n), "path": None} for n in numbers]
        table = pyarrow.table({"image": images, "label": [n % 3 for n in numbers], "n": numbers})
        path = root / "data" / f"{split}-{first // 4:05d}-of-00002.parquet"
        pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)
    (root / "README.md").write_text("A set.")
    samples = [{"__key__": f"s{n}", "png": picture(n), "cls": n % 2} for n in range(7)]
    wt.pack(samples, root / "made", max_shard_samples=3)
    return root


@pytest.fixture
def hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving_hub(root, "owner/name") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_a_table_on_the_hub_is_converted_and_the_token_is_sent_only_to_the_hub(
    hub: Hub, tmp_path: Path
) -> None:
    words = ["hf://datasets/owner/name", str(tmp_path / "out"), "--image", "image"]
    assert main(["convert", "table", *words, "--label", "label"]) == 0
    index = wt.open(tmp_path / "out")
    assert index.labels[0].classes == ("cat", "dog", "owl")
    counts = {shard.split: shard.samples for shard in index.shards}
    assert counts == {"train": 8, "val": 2, "test": 2}
    assert hub.files.headers
    assert all("Authorization" not in headers for headers in hub.files.headers)
    samples = dict(read_with_webdataset(sorted((tmp_path / "out").glob("*.tar"))))
    assert set(samples) >= {
        "data/train-00000-of-00002/row-000000001",
        "data/test-00002-of-00002/row-000000002",
    }
    for fields in samples.values():
        number = json.loads(fields["json"])["n"]
        assert fields["png"] == picture(number)
        assert fields["cls"] == str(number % 3).encode()


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("made", 7),
        ("made/index.json", 7),
        ("made/*.tar", 7),
        ("made/train-{000000..000001}.tar", 6),
    ],
)
def test_shards_on_the_hub_are_read_in_place(
    hub: Hub, root: Path, pattern: str, count: int
) -> None:
    if pattern == "made":  # they are indexed from their headers
        for path in (root / "made").glob("index.*"):
            path.unlink()
    loader = wt.Loader(f"hf://datasets/owner/name/{pattern}", batch_size=2, tail="keep")
    delivered = by_key(loader, "png")
    assert len(delivered) == count
    assert all(data == picture(int(key[1:])) for key, data in delivered.items())


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("hf://datasets/owner", UsageError, "not a valid address of the Hub"),
        ("hf://datasets/owner/name/none", UsageError, "none of the .* files of this data set"),
        ("hf://datasets/owner/name/data", UsageError, "hold no .tar.*wdstrain convert table"),
        ("hf://datasets/owner/name@v2", StorageError, "no such data set or revision"),
    ],
)
def test_missing_data_on_the_hub_is_an_error(
    hub: Hub, address: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        wt.open(address)


def test_a_private_data_set_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(StorageError, match=re.escape("HF_TOKEN gives access")):
        wt.open("hf://datasets/owner/name/made")
