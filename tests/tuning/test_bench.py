"""`wt.bench` names the planted bottleneck, measures every stage, and runs other settings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdstrain as wt
from tests.conftest import write_picture_shards, write_shards
from tests.support.servers import serving
from wdstrain.cli import main
from wdstrain.runtime.machine import cores


class SleepingField:
    """A field that sleeps 4 ms per sample, without using a processor."""

    names, example = ("txt",), None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> str:
        time.sleep(0.004)
        return bytes(data).decode()


def sleeping_transform(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    time.sleep(0.004)
    return {"x": np.full(4, rng.random()), "n": len(sample["txt"])}


def verdict_matches(result: wt.Bench, words: str) -> bool:
    """Return whether the verdict has these words, or reports that the machine was busy."""
    return words in result.verdict or "Measure again" in result.verdict


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """200 samples with a text and a class."""
    shards = write_shards(tmp_path / "shards", [200])
    wt.index(shards)
    return shards


def test_slow_decoding_is_named(texts: Path) -> None:
    result = wt.bench(texts, {"txt": SleepingField()}, batch_size=8, num_workers=0, seconds=0.3)
    assert result.bottleneck == "decode"
    assert verdict_matches(result, "decoding in")
    # 4 ms per sample and decoder are at most 250 samples/s. When the clock starts, each decoder may
    # be about to finish a batch of 8, which then counts within the 0.3 seconds.
    assert result.stages["decode"] <= (250 + 8 / 0.3) * result.decoders
    assert result.stages["decode"] < result.stages["hand-off"]


def test_a_slow_transform_is_named(texts: Path) -> None:
    options = {"batch_size": 8, "num_workers": 1, "seconds": 0.3}
    result = wt.bench(texts, transform=sleeping_transform, **options)
    assert result.bottleneck == "transform"
    assert verdict_matches(result, "the transform in")


def test_slow_storage_is_named(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    samples = ({"__key__": f"k{i:03d}", "txt": f"{i}"} for i in range(60))
    wt.pack(samples, str(shards), max_shard_samples=8)
    with serving(shards) as served:
        served.delay = 0.04
        options = {"batch_size": 8, "seconds": 0.1}
        result = wt.bench(f"{served.url}/index.json", {"txt": wt.text()}, **options)
        cache = {"cache_dir": tmp_path / "cache", "cache_limit": "1GB"}
        assert wt.bench(f"{served.url}/index.json", **cache, **options).achieved > 0
    assert result.bottleneck == "storage"
    assert verdict_matches(result, "storage (")


def test_tuning_runs_other_numbers_of_workers_and_names_the_fastest(texts: Path) -> None:
    result = wt.bench(texts, {"txt": SleepingField()}, batch_size=8, seconds=0.2, tune=True)
    tried = {trial.setting for trial in result.trials}
    powers = {2**power for power in range(9) if 2**power <= cores()}
    assert tried == {f"num_workers={n}" for n in powers | {cores()}}
    assert all(trial.rate > 0 for trial in result.trials)
    shown = [value for name, value in result.rows() if name == "use"]
    assert shown == (result.advice or ["the current settings"])
    assert json.loads(json.dumps(result.as_dict()))["verdict"] == result.verdict
    assert result.verdict in " ".join(repr(result).split())  # which breaks long lines


def test_a_set_smaller_than_a_batch_is_measured(tmp_path: Path) -> None:
    result = wt.bench(write_shards(tmp_path / "shards", [1]), batch_size=1, seconds=0.05)
    assert (result.samples, set(result.stages)) == (1, {"storage", "hand-off"})
    assert result.achieved > 0


def test_bad_samples_are_replaced_and_rates_and_the_bottleneck_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_picture_shards(tmp_path / "shards", [32], bad=range(0, 32, 4))
    words = ["bench", str(tmp_path / "shards"), "--batch-size", "8", "--seconds", "0.1"]
    assert main([*words, "--image-size", "32"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "storage",
        "decode",
        "hand-off",
        "loader",
        "first batch",
        "bad samples",
        "verdict",
    ):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert main([*words, "--bytes", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bottleneck"] in ("storage", "hand-off")
    assert result["achieved"] > 0


def test_without_images_and_arrays_bytes_are_delivered(texts: Path, capsys: Any) -> None:
    assert main(["bench", str(texts), "--seconds", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert "nothing: the batches hold bytes" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "0"], "--seconds 0.0: must be > 0"),
        (["--augment", "mirror"], "--augment mirror: 'mirror' is not known"),
        (["--cache-limit", "1GB"], "--cache-limit 1000000000 needs --cache-dir"),
    ],
)
def test_invalid_arguments_of_the_verb_are_refused(
    texts: Path, capsys: Any, words: list[str], message: str
) -> None:
    assert main(["bench", str(texts), *words]) == 2
    assert message in capsys.readouterr().err
