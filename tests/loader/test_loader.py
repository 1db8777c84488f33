"""The loader delivers the planned samples with any decoder, and batches stay valid while held."""

from __future__ import annotations

import gc
import math
import os
import random
import re
import select
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import wdstrain as wt
from tests.conftest import Sample, keys_of, picture, write_tar
from tests.support.children import Program, ended
from wdstrain.errors import SampleError, ShardError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PICTURE = {"image": wt.image(size=8), "label": wt.label()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_kept_batches_do_not_change_and_memory_of_released_ones_is_reused(
    photos: Path, num_workers: int
) -> None:
    with wt.Loader(photos, PICTURE, batch_size=4, num_workers=num_workers) as loader:
        places = {batch["image"].data_ptr() for _ in range(8) for batch in loader}
        assert len(places) <= (40 if num_workers else 16)  # of 120 batches
        assert loader.report()["copies"] == 0
        first = [(b["label"].tolist(), b["image"].sum().item()) for b in loader.epoch(0)]
        kept = [b for _ in range(2) for b in loader.epoch(0)]  # more than batch slots
        assert [(b["label"].tolist(), b["image"].sum().item()) for b in kept] == first * 2
        assert loader.report()["copies"] > 0


def test_kept_values_of_any_size_do_not_change_and_can_be_written_to(photos: Path) -> None:
    def values(batch: dict[str, Any]) -> list[Any]:
        return [image.tolist() for image in batch["image"]]

    with wt.Loader(photos, {"image": wt.image()}, batch_size=3, num_workers=2) as loader:
        expected = [values(batch) for batch in loader.epoch(0)]
        kept = list(loader.epoch(0))
        for batch in kept[::2]:
            for image in batch["image"]:
                image.fill_(7)
        assert [values(b) for b in kept[1::2]] == expected[1::2]
        assert [values(b) for b in loader.epoch(0)] == expected


def failing(_: Any) -> Any:
    raise KeyError("no such thing")


def a_tuple(_: Any) -> Any:
    return (1, 2)


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {"double": 2 * int(sample["cls"])}


def ragged(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Return as many ones as the class of the sample, and None for the classes 5, 12 and 19."""
    number = int(sample["cls"])
    return None if number % 7 == 5 else {"x": torch.ones(number + 1)}


GOOD: Sample = ("g", {"png": picture(0), "cls": b"1"})
TEXT = {"txt": b"x"}
REPLACE: dict[str, Any] = {"on_error": "replace", "max_errors": 1.0}
LABEL = {"fields": {"label": wt.label()}}
IMAGES: dict[str, Any] = {"fields": PICTURE}
RAGGED: dict[str, Any] = {"transform": ragged}
DOUBLE: dict[str, Any] = {"transform": double}
KNOWN: Sample = ("k0", {**TEXT, "cls": b"1"})
CANNOT_STACK = "a batch that begins with.*cannot be stacked: stack expects.*collate_fn"


def partly_cut(count: int, every: int) -> list[Sample]:
    """Return samples of which every nth image is truncated."""
    images = [picture(i)[: None if i % every else 60] for i in range(count)]
    return [(f"k{i}", {"png": image, "cls": b"1"}) for i, image in enumerate(images)]


def labelled(*classes: bytes) -> list[Sample]:
    return [(f"k{i}", {"cls": data}) for i, data in enumerate(classes)]


# samples, options of the loader, and the error
BAD: list[tuple[list[Sample], dict[str, Any], str]] = [
    (partly_cut(1, 1), IMAGES, r"a.tar: 'k0', field 'png' at offset 512: image file is truncated"),
    ([KNOWN, ("k1", TEXT)], LABEL, "'k1', the sample at offset 2048: it has none of cls .but txt"),
    (labelled(b"cat"), LABEL, "'k0', field 'cls' at offset 512: 'cat' is not a whole number"),
    (
        partly_cut(40, 4),
        {**IMAGES, "batch_size": 8, **REPLACE, "max_errors": 0.1},
        r"[5-9] of the 40 samples of epoch 0 are bad, more than max_errors=0.1.*[5-9] x png",
    ),
    (
        [*((f"k{i}", TEXT) for i in range(8)), ("k8", {**TEXT, "jpg": b"no picture"})],
        {"fields": {"image": wt.image(size=8)}, "batch_size": 4, **REPLACE},
        "'k0'.*it has none of jpg, jpeg, .*but txt.*No good sample was found",
    ),
    ([GOOD], {"transform": failing}, "transform raised KeyError: 'no such thing'"),
    ([GOOD], {"transform": a_tuple}, "transform returned tuple; an example must be.*collate_fn"),
    (labelled(b"5"), RAGGED, r"returned None.*--where\)\. on_error='replace' goes on without it"),
    (labelled(b"1", b"2"), {**RAGGED, "batch_size": 2}, CANNOT_STACK),
    (labelled(b"1", b"2"), {**RAGGED, "batch_size": 2, **REPLACE}, CANNOT_STACK),
    ([GOOD], {**DOUBLE, "collate_fn": failing}, "collate_fn raised KeyError: 'no such thing'"),
    ([GOOD], {**DOUBLE, "collate_fn": a_tuple}, "it returned tuple; a batch must be a dict of val"),
]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("samples", "options", "words"), BAD, ids=range(len(BAD)))
def test_an_error_names_the_sample_and_the_next_step(
    samples: list[Sample], options: dict[str, Any], words: str, num_workers: int, tmp_path: Path
) -> None:
    write_tar(tmp_path / "a.tar", samples)
    options = {"batch_size": 1, "shuffle": False, "num_workers": num_workers, **options}
    with wt.Loader(tmp_path, **options) as loader:
        with pytest.raises(SampleError, match=words) as raised:
            keys_of(loader)
        if words == CANNOT_STACK:
            assert "on_error" not in str(raised.value)
            assert "No good sample" not in str(raised.value)


def test_a_value_that_cannot_be_pickled_raises_and_does_not_hang(shards: Path) -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    options |= {"transform": double, "collate_fn": lambda _: {"x": lambda: 1}}
    loader = wt.Loader(shards, batch_size=4, **options)
    with pytest.raises(SampleError, match="cannot be sent from a worker process.*num_workers=0"):
        keys_of(loader)


def picky_and_random(sample: dict[str, Any]) -> dict[str, Any]:
    number = int(sample["cls"])
    if number % 3 == 0:
        raise ValueError("a third is bad")
    crop = v2.RandomResizedCrop(8)(torch.arange(300, dtype=torch.uint8).view(1, 15, 20))
    numbers = [random.random(), np.random.rand(), torch.rand(1).item(), crop.sum()]
    return {"n": number, "drawn": np.array(numbers)}


def test_global_generators_are_seeded_per_sample_in_worker_processes(shards: Path) -> None:
    """Of substitutes, too. The generators of this process stay as they are."""
    torch.manual_seed(1)
    numbers = []
    for workers in (1, 3):
        options: dict[str, Any] = {**REPLACE, "batch_size": 1, "num_workers": workers}
        with wt.Loader(shards, transform=picky_and_random, **options) as loader:
            numbers.append([(batch["n"].item(), batch["drawn"].tolist()) for batch in loader])
            following = [batch["drawn"].tolist() for batch in loader]
            assert not [row for row in following if row in [drawn for _, drawn in numbers[0]]]
    assert numbers[0] == numbers[1]
    drawn = {n: values for n, values in numbers[0]}
    assert len(drawn) == 14
    assert all(drawn[n] == values for n, values in numbers[0])  # also those of a substitute
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(expected, torch.rand(1))


@pytest.mark.parametrize("when", ["before", "while it is used"])
def test_samples_beyond_the_end_of_a_cut_shard_are_replaced(tmp_path: Path, when: str) -> None:
    rows = ({"__key__": f"k{n:03d}", "bin": bytes([n]) * 3000} for n in range(90))
    index = wt.pack(rows, str(tmp_path / "s"), max_shard_samples=30, shuffle=False)
    shard, cut = index.shards[0].path, int(index.offsets.start[25] + 700)  # in sample 25
    options: dict[str, Any] = {"batch_size": 6, "shuffle": False, **REPLACE}
    if when == "before":
        os.truncate(shard, cut)
    with wt.Loader(tmp_path / "s", **{**options, "max_errors": 0.1}) as loader:
        os.truncate(shard, cut)
        actual = [item for b in loader for item in zip(b["__key__"], b["bin"], strict=True)]
    assert all(data == bytes([int(key[1:])]) * 3000 for key, data in actual)
    assert {key for key, _ in actual} == {f"k{n:03d}" for n in range(90) if not 25 <= n < 30}
    assert len(actual) == 90
    bad = loader.report()["bad_samples"]
    assert [each["key"] for each in bad] == [f"k{n:03d}" for n in range(25, 30)]
    assert "cannot be read" in bad[0]["reason"]
    with pytest.raises(ShardError, match=r"train-000000.tar has \d+ bytes, its index says"):
        wt.Loader(tmp_path / "s", batch_size=6, on_error="raise")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fields": {"x": wt.image("jpg;png")}}, "'x' looks for jpg, png; these shards hold cls"),
        ({"shuffle_buffer": 0}, "shuffle_buffer=0"),
        ({"rank": 2, "world_size": 2}, "rank=2: must be >= 0 and below world_size=2"),
        ({"rank": 0}, "give both or none"),
        ({"fields": {"label": wt.label()}, "transform": double}, "fields and transform"),
        ({"batch_size": 100}, "21 samples cannot give 1 rank"),
        ({"fields": {"image": "jpg"}}, r"fields\['image'\]='jpg': must be a field"),
        ({"fields": ["image"]}, "must be a dict"),
        ({"multiprocessing_context": "x"}, "must be one of fork, forkserver, spawn"),
        ({"on_error": "skip"}, "must be one of raise, replace, mark"),
        ({"collate_fn": list}, "Give transform too"),
        ({"collate_fn": 3, "transform": double}, "collate_fn=3: must be a function"),
        *(
            ({"patience": value}, "patience=.*: must be a number of seconds >= 0")
            for value in (-1, None, math.nan, "60")
        ),
        ({"max_errors": "1%"}, "max_errors='1%'|max_errors=1%"),
        ({"max_errors": math.nan}, "max_errors=nan"),
        ({"batch_size": None}, "batch_size=None: must be an integer >= 1"),
        ({"cache_limit": 0, "cache_dir": "c"}, "cache_limit=0: must be an integer >= 1"),
    ],
)
def test_wrong_arguments_are_refused(shards: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wt.Loader(shards, **options)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("pin_memory", "Not needed: wt.to_device"),
        ("drop_last", 'Use tail="drop" or tail="keep"'),
        ("sampler", "where=, weights= or balance="),
        ("generator", "seed="),
        ("dataset", "urls"),
        ("workers", "Did you mean num_workers?"),
    ],
)
def test_an_argument_of_other_loaders_is_refused_with_the_next_step(
    shards: Path, argument: str, hint: str
) -> None:
    for call in (partial(wt.Loader, shards), partial(wt.mix, {"a": shards})):
        with pytest.raises(TypeError, match=rf"^\w+\(\) .*'{argument}'\. .*{re.escape(hint)}"):
            call(**{argument: None})


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_loader_in_a_data_loader_of_torch_is_refused(shards: Path, batch_size: Any) -> None:
    with wt.Loader(shards, batch_size=2) as loader:
        wrapped: Any = DataLoader(loader, batch_size=batch_size)
        with pytest.raises(TypeError, match="Use it in place of a DataLoader"):
            next(iter(wrapped))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_interrupted_loops_leave_no_threads_and_no_files(photos: Path, num_workers: int) -> None:
    def descriptors(loader: wt.Loader) -> int:
        for _ in loader:
            break
        return len(os.listdir("/proc/self/fd"))

    with wt.Loader(photos, PICTURE, batch_size=4, num_workers=num_workers) as loader:
        before = descriptors(loader)
        assert max(descriptors(loader) for _ in range(20)) <= before + 1
        with pytest.raises(ZeroDivisionError):
            list(1 // 0 for _ in loader)
    closed = []
    for _ in range(4):
        with wt.Loader(photos, PICTURE, batch_size=4, num_workers=num_workers) as loader:
            descriptors(loader)
        gc.collect()
        closed.append(len(os.listdir("/proc/self/fd")))
    assert closed[0] == closed[-1]
    assert not [name for name in os.listdir("/dev/shm") if "wdstrain" in name]


def count_threads(_: Any) -> dict[str, int]:
    torch.nn.functional.interpolate(torch.rand(1, 3, 64, 64), (32, 32))
    return {"threads": torch.get_num_threads()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_decoder_computes_on_one_core_and_torch_keeps_its_threads_and_random_state(
    shards: Path, num_workers: int
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers}
        with wt.Loader(shards, **LABEL, **options) as loader:
            keys_of(loader)
            assert torch.equal(torch.rand(1), expected)
        with wt.Loader(shards, transform=count_threads, **options) as loader:
            assert {count for batch in loader for count in batch["threads"].tolist()} == {1}
            seen = [torch.get_num_threads()]
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
        assert seen == [3, 3]
    finally:
        torch.set_num_threads(threads)


def test_the_report_counts_padded_rows_and_samples_that_are_left_out(shards: Path) -> None:
    for tail, counts in (("drop", (0, 5)), ("pad", (3, 0))):
        loader = wt.Loader(shards, batch_size=8, tail=tail)
        keys_of(loader)
        assert (loader.report()["padded"], loader.report()["left_out"]) == counts


COLLECTING = """
    import gc, sys
    import wdstrain as wt

    gc.freeze()
    gc.disable()

    def make():
        box = []

        def collecting(sample):
            gc.collect()
            return {"n": 1}

        loader = wt.Loader(sys.argv[1], transform=collecting, batch_size=1)
        box += [loader, box]  # a cycle: only the collector ends it
        next(iter(loader))

    for _ in range(3):
        make()
    print("done")
"""


def test_a_loader_that_its_own_thread_collects_ends(shards: Path) -> None:
    done = ended(COLLECTING, shards)
    assert (done.status, done.out) == (0, "done\n"), done.err


ENDLESS = """
    import sys, multiprocessing
    import wdstrain as wt

    loader = wt.Loader(sys.argv[1], {"label": wt.label()}, batch_size=2, num_workers=2, multiprocessing_context="fork")
    next(iter(loader))
    print(*[child.pid for child in multiprocessing.active_children()])
    while True:
        list(loader)
"""


def test_workers_end_with_their_killed_parent(shards: Path) -> None:
    program = Program(ENDLESS, shards)
    workers = [os.pidfd_open(int(word)) for word in program.out.readline().split()]
    assert len(workers) == 2
    os.kill(program.pid, signal.SIGKILL)
    program.end()
    for worker in workers:
        assert select.select([worker], [], [], 60)[0]  # readable when the process has ended
        os.close(worker)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "wdstrain"))]
