"""What holds loading back is measured, what a change would give is predicted, and the prediction comes true."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import picture, write_shards, write_tar
from tests.support.servers import serving
from wdstrain.runtime.machine import cores
from wdstrain.shards.resolve import open_index
from wdstrain.tuning.stages import excerpt

SHORT = 1.5  # seconds of a measurement


class Sleepy:
    """A field that takes 4 ms for a sample and no processor."""

    names, example = ("txt",), None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> str:
        time.sleep(0.004)
        return bytes(data).decode()


class Busy:
    """A field that computes with the interpreter's lock in its hands."""

    names, example = ("txt",), None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> str:
        return f"{bytes(data).decode()} {sum(range(20_000))}"


def photograph(number: int, side: int) -> bytes:
    """A JPEG of smooth noise, so that it takes as long to decode as a photograph of its size."""
    pixels = np.random.Generator(np.random.PCG64(number)).integers(
        0, 255, (side // 16, side // 12, 3), np.uint8
    )
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((side * 4 // 3, side), Image.Resampling.BICUBIC).save(
        buffer, "JPEG", quality=90
    )
    return buffer.getvalue()


def photographs(folder: Path, count: int, side: int) -> Path:
    write_tar(
        folder / "a.tar",
        [(f"k{i:03d}", {"jpg": photograph(i, side), "cls": b"0"}) for i in range(count)],
    )
    wt.index(folder)
    return folder


def within_a_fifth(predicted: float, then: float) -> bool:
    return 0.8 <= then / predicted <= 1.25


@pytest.mark.slow
@pytest.mark.alone
def test_what_more_workers_give_is_what_was_predicted(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [200])
    wt.index(shards)
    fields: Mapping[str, Any] = {"txt": Sleepy()}
    now = wt.bench(
        shards, fields, batch_size=8, num_workers=1, seconds=SHORT
    )  # a message of a worker is up to four batches
    assert now.binding == "decode"
    assert "decoding binds" in now.verdict
    (change,) = now.changes
    workers = int(change.what.removeprefix("num_workers="))
    then = wt.bench(shards, fields, batch_size=8, num_workers=workers, seconds=SHORT)
    assert within_a_fifth(now.predicted(1), now.achieved)
    assert within_a_fifth(change.rate, then.achieved), (change, then)


@pytest.mark.alone
@pytest.mark.skipif(cores() < 2, reason="one processor decodes one at a time in any case")
def test_threads_that_wait_for_the_interpreters_lock_are_told_from_busy_processors(
    tmp_path: Path,
) -> None:
    shards = write_shards(tmp_path / "shards", [100])
    wt.index(shards)
    for _ in range(4):
        found = wt.bench(shards, {"txt": Busy()}, batch_size=8, seconds=0.3)
        if (
            "Measure again" not in found.verdict
        ):  # it says so where others had the processors meanwhile
            break
    assert found.binding == "lock"
    assert "the interpreter's lock binds, for which threads wait" in found.verdict
    assert found.predicted(0) < found.decode["threads"][cores()]
    assert [change.what for change in found.changes] == [f"num_workers={cores()}"]


@pytest.mark.slow
@pytest.mark.alone
def test_what_a_cache_gives_is_what_was_predicted(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    wt.pack(
        ({"__key__": f"k{i:03d}", "txt": f"{i}"} for i in range(120)), str(shards), shard_samples=3
    )
    fields: Mapping[str, Any] = {"txt": Sleepy()}
    with serving(shards) as served:
        served.delay = 0.1
        url = f"{served.url}/index.json"
        now = wt.bench(url, fields, batch_size=8, seconds=1.5)
        assert now.binding == "storage"
        (change,) = [change for change in now.changes if "cache_dir" in change.what]
        loader = wt.Loader(url, batch_size=8, cache_dir=tmp_path / "cache", tail="keep")
        for _ in loader:
            pass  # the first epoch fills it
        loader.close()
        then = wt.bench(url, fields, batch_size=8, seconds=SHORT, cache_dir=tmp_path / "cache")
    assert within_a_fifth(change.rate, then.achieved), (change, then)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_what_smaller_pictures_give_is_what_was_predicted(tmp_path: Path) -> None:
    shards = photographs(tmp_path / "large", 96, 720)
    fields = {"image": wt.image(size=64, augment="rrc+flip")}
    ratios = list[float]()
    while (
        len(ratios) < 8
    ):  # where other programs take processors as they like, one may be a fifth off by itself
        # a worker process: of threads that wait for each other at every small picture no two runs are alike
        now = wt.bench(shards, fields, batch_size=16, num_workers=1, seconds=0.7)
        if "Measure again" in now.verdict:
            continue
        (change,) = [change for change in now.changes if "--resize" in change.what]
        if not ratios:
            wt.pack_tars(
                str(shards), str(tmp_path / "small"), resize=int(change.what.rpartition(" ")[2])
            )
        assert change.rate > 1.5 * now.achieved
        ratios.append(loaded(tmp_path / "small", fields, 0.7) / change.rate)
    assert within_a_fifth(1, statistics.geometric_mean(ratios)), ratios


def loaded(shards: Path, fields: Mapping[str, Any], seconds: float) -> float:
    """Samples a second that come from a loader with one worker."""
    with closing(wt.Loader(shards, fields, batch_size=16, num_workers=1)) as loader:
        batches = chain.from_iterable(repeat(loader))
        next(batches)  # when the worker has begun
        begun = time.perf_counter()
        for number, _ in enumerate(batches, 1):
            if (spent := time.perf_counter() - begun) >= seconds:
                return 16 * number / spent
    raise AssertionError


def test_tuning_tries_other_workers_and_names_the_best(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [200])
    wt.index(shards)
    found = wt.bench(shards, {"txt": Sleepy()}, batch_size=8, seconds=0.1, tune=True)
    assert [one.num_workers for one in found.tries] == sorted(
        {0, 1, cores(), *[2**n for n in range(9) if 2**n <= cores()]}
    )
    assert found.best is not None
    assert found.best.rate >= 0.99 * max(one.rate for one in found.tries)
    assert (
        "best",
        f"num_workers={found.best.num_workers}: {found.best.rate:.0f} samples/s",
    ) in found.rows()
    assert "what holds loading back" in found._repr_html_()
    assert json.loads(json.dumps(found.as_dict()))["verdict"] == found.verdict


@pytest.mark.parametrize("count", [1, 3, 4, 95, 96])
def test_an_excerpt_as_large_as_the_set_is_the_set(count: int, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [count])
    assert len(excerpt(wt.index(tmp_path / "shards"), count, str(tmp_path / "part.tar"))) == count


@pytest.mark.parametrize("workers", [0, 1])
def test_transforms_and_bytes_are_measured_too(tmp_path: Path, workers: int) -> None:
    shards = write_shards(tmp_path / "shards", [64])
    wt.index(shards)

    def transform(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"x": np.full(4, rng.random()), "n": len(sample["txt"])}

    made = wt.bench(
        shards,
        transform=transform,
        batch_size=8,
        num_workers=workers,
        seconds=0.1,
        multiprocessing_context="fork",
    )
    plain = wt.bench(shards, batch_size=8, num_workers=workers, seconds=0.1)
    for found in (made, plain):
        assert found.achieved > 0
        assert found.storage > 0
        assert (
            found.binding in found.verdict.replace("decoding", "decode")
            or "Measure again" in found.verdict
        )
    assert plain.handoff == {}
    assert set(made.handoff) == {"threads", "processes"}


def dies(sample: dict[str, Any]) -> dict[str, int]:
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return {"n": len(sample["txt"])}


def test_a_decoder_that_dies_while_it_is_measured_is_an_error_and_not_a_hang(
    tmp_path: Path,
) -> None:
    shards = write_shards(tmp_path / "shards", [40])
    with pytest.raises(wt.WdstrainError, match="a process that decoded by itself died"):
        wt.bench(shards, transform=dies, batch_size=8, seconds=0.1, multiprocessing_context="fork")


def test_samples_that_are_bad_are_counted_and_end_nothing(tmp_path: Path) -> None:
    samples = [
        (f"k{i:02d}", {"png": picture(i) if i % 4 else b"none", "cls": b"0"}) for i in range(32)
    ]
    write_tar(tmp_path / "shards" / "a.tar", samples)
    found = wt.bench(tmp_path / "shards", {"image": wt.image(size=8)}, batch_size=8, seconds=0.1)
    assert found.bad > 0
    assert any(name == "bad samples" for name, _ in found.rows())


def test_an_excerpt_is_a_tar_of_its_own_of_samples_from_all_over(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [100, 100, 100])
    wt.index(shards)
    with serving(shards) as served:
        index = open_index(f"{served.url}/index.json")
        few = excerpt(index, 40, str(tmp_path / "few.tar"))
    said = [
        int((tmp_path / "few.tar").read_bytes()[offset : offset + size])
        for offset, size in _classes(few)
    ]
    assert 40 <= len(few) <= 44
    assert said == sorted(said)
    assert {number // 100 for number in said} == {0, 1, 2}
    assert said[0] == 0
    assert said[-1] >= 289


def _classes(index: wt.Index) -> list[tuple[int, int]]:
    return [
        (offset, size)
        for n in range(len(index))
        for name, offset, size in index.members(n)
        if name == "cls"
    ]


@pytest.mark.slow
def test_the_verb_prints_limits_and_verdict(tmp_path: Path) -> None:
    shards = photographs(tmp_path / "shards", 32, 96)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "wdstrain",
            "bench",
            str(shards),
            "--batch-size",
            "8",
            "--seconds",
            "0.1",
            *words,
        ]
        return subprocess.run(command, capture_output=True, text=True)

    shown = run("--image-size", "32", "--cold")
    assert shown.returncode == 0, shown.stderr
    for word in (
        "storage",
        "decode, threads",
        "decode, processes",
        "hand-off",
        "achieved",
        "first batch",
        "verdict",
    ):
        assert word in shown.stdout
    assert (
        "bind" in shown.stdout or "Measure again" in shown.stdout
    )  # on a machine that was busy meanwhile
    assert max(map(len, shown.stdout.splitlines())) <= 80
    found = json.loads(run("--bytes", "--json").stdout)
    assert found["binding"] in ("storage", "decode")
    assert found["achieved"] > 0
    wrong = run("--seconds", "0")
    assert (wrong.returncode, "each measurement takes some" in wrong.stderr) == (2, True)
    texts = write_shards(tmp_path / "texts", [9])
    done = subprocess.run(
        [sys.executable, "-m", "wdstrain", "bench", str(texts)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "these shards hold no pictures and no arrays, but cls, txt. Use --bytes" in done.stderr
