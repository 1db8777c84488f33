"""Loaders and streams with webdataset, in both directions, and under a plain DataLoader."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds

import wdstrain as wt
from tests.conftest import Sample, keys_of, picture, write_tar
from wdstrain.errors import SampleError, UsageError


def shout(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "txt": sample["txt"].decode().upper()}


def test_webdataset_stages_follow_a_stream(shards: Path) -> None:
    pipeline = wds.DataPipeline(
        wt.stream(shards, shuffle=False),
        wds.map(shout),
        wds.to_tuple("__key__", "txt"),
        wds.batched(5),
    )
    batches = list(pipeline)
    assert [key for keys, _ in batches for key in keys] == [f"s{i:06d}" for i in range(21)]
    assert batches[0][1][3] == "SAMPLE 3"


def test_a_stream_has_the_order_of_the_loader_in_every_epoch(shards: Path) -> None:
    stream = wt.stream(shards, seed=5)
    epochs = [[sample["__key__"] for sample in stream] for _ in range(2)]
    loader = wt.Loader(shards, batch_size=64, tail="keep", seed=5)
    assert epochs == [[key for keys in keys_of(loader) for key in keys] for _ in range(2)]
    stream.set_epoch(0)
    assert [sample["__key__"] for sample in stream] == epochs[0]


def test_samples_have_the_keys_of_webdataset(shards: Path) -> None:
    sample = next(iter(wt.stream(shards, shuffle=False)))
    about = {"__key__": "s000000", "__url__": str(shards / "part-000.tar"), "__epoch__": 0}
    assert sample == {**about, "cls": b"0", "txt": b"sample 0"}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    samples: list[Sample] = [
        (f"k{i}", {"jpg": picture(i, kind="JPEG"), "cls": b"%d" % i}) for i in range(6)
    ]
    write_tar(tmp_path / "p" / "a.tar", samples)
    return tmp_path / "p"


def test_fields_decode_samples_of_webdataset(pictures: Path) -> None:
    fields = {"image": wt.image(size=8, augment="flip"), "label": wt.label()}
    pipeline = wds.DataPipeline(
        wds.SimpleShardList(str(pictures / "a.tar")),
        wds.tarfile_to_samples(),
        wds.map(wt.to_example(fields)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of webdataset's open files
        actual = list(pipeline)
        gc.collect()
    assert [int(example["label"]) for example in actual] == list(range(6))
    assert actual[0]["image"].shape == (3, 8, 8)


def test_decoding_a_stream_depends_only_on_the_epoch(pictures: Path) -> None:
    decode = wt.to_example({"image": wt.image(size=8, augment="rrc")})

    def pixels(epoch: int) -> list[int]:
        stream = wt.stream(pictures, shuffle=False)
        stream.set_epoch(epoch)
        return [int(decode(sample)["image"].astype(int).sum()) for sample in stream]

    assert pixels(0) == pixels(0)
    assert pixels(0) != pixels(1)


def test_an_undecodable_sample_is_named(pictures: Path) -> None:
    sample = next(iter(wt.stream(pictures, shuffle=False)))
    with pytest.raises(SampleError, match="'k0' has none of png .but jpg, cls"):
        wt.to_example({"image": wt.image("png", size=8)})(sample)
    with pytest.raises(SampleError, match="a.tar: 'k0', field 'cls': .*"):
        wt.to_example({"image": wt.image("cls", size=8)})(sample)


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        wt.stream(tmp_path)
