"""The loader delivers the planned samples with any decoder, and batches stay valid while held."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import pickle
import random
import re
import select
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

import wdstrain as wt
from tests.conftest import Sample, picture, quick_and_slow, write_shards, write_tar
from tests.support.children import Program, ended
from tests.support.os_faults import recorded_reads
from wdstrain.errors import SampleError, ShardError, UsageError, WdstrainError
from wdstrain.native import kernels

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

FIELDS = {
    "image": wt.image(size=(16, 20), augment="rrc+flip"),
    "label": wt.label(),
    "text": wt.text(),
}


def keys(loader: wt.Loader) -> list[list[str]]:
    return [batch["__key__"] for batch in loader]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards with 41 pictures, PNG and JPEG, of different sizes."""
    folder = tmp_path_factory.mktemp("pictures")
    number = 0
    for shard, count in enumerate([17, 1, 23]):
        samples: list[Sample] = []
        for _ in range(count):
            kind = "JPEG" if number % 3 == 0 else "PNG"
            data = picture(number, size=(24 + number % 5, 20 + number % 7), kind=kind)
            fields = {
                kind.lower().replace("jpeg", "jpg"): data,
                "cls": b"%d" % number,
                "txt": b"n%d" % number,
            }
            samples.append((f"s{number:06d}", fields))
            number += 1
        write_tar(folder / f"p-{shard}.tar", samples)
    return folder


def test_each_loop_is_the_next_epoch_and_a_new_loader_repeats_the_epochs(shards: Path) -> None:
    loader = wt.Loader(shards, batch_size=4)
    epochs = [keys(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(len(epoch) == len(loader) == 5 for epoch in epochs)
    repeated = wt.Loader(shards, batch_size=4)
    repeated.set_epoch(2)
    assert keys(repeated) == epochs[2]
    assert [batch["__key__"] for batch in repeated.epoch(1, start=2)] == epochs[1][2:]
    assert keys(repeated) == epochs[2]  # the epoch after epoch 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_kept_batches_do_not_change(pictures: Path, num_workers: int) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=4, num_workers=num_workers)
    first = [(batch["label"].tolist(), batch["image"].sum().item()) for batch in loader.epoch(0)]
    kept = [
        batch for _ in range(3) for batch in loader.epoch(0)
    ]  # 30 batches, many more than batch slots
    again = [(batch["label"].tolist(), batch["image"].sum().item()) for batch in kept]
    assert again == first * 3
    assert loader.report()["copies"] > 0
    loader.close()


def test_a_view_of_a_batch_keeps_its_memory_alive(pictures: Path) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=4)
    views = []
    for batch in loader.epoch(0):
        views.append((batch["image"][0, 0], batch["image"][0, 0].clone()))
    del batch
    gc.collect()
    for _ in loader.epoch(1):
        pass
    assert all(torch.equal(view, copy) for view, copy in views)


def test_memory_of_released_batches_is_reused(pictures: Path) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=4)
    places = {batch["image"].data_ptr() for _ in range(8) for batch in loader}
    assert len(places) <= 16
    assert loader.report()["copies"] == 0


def test_a_state_of_another_order_is_refused_with_both_values(shards: Path) -> None:
    state = wt.Loader(shards, batch_size=4, seed=1).state_dict()
    with pytest.raises(UsageError, match=r"seed was 1, is 2; global_batch was 4, is 5"):
        wt.Loader(shards, batch_size=5, seed=2).load_state_dict(state)


def test_two_loops_over_one_loader_are_refused(shards: Path) -> None:
    loader = wt.Loader(shards, batch_size=4)
    first, second = iter(loader), loader.epoch(0)
    next(first)
    next(second)
    with pytest.raises(WdstrainError, match="another loop"):
        next(first)


def test_a_bad_sample_is_named_with_shard_key_field_and_offset(tmp_path: Path) -> None:
    for number, workers in ((0, 0), (1, 2)):
        folder = tmp_path / str(number)
        samples: list[Sample] = [(f"k{i}", {"png": picture(i), "cls": b"1"}) for i in range(5)]
        samples[3][1]["png"] = picture(3)[:60]
        write_tar(folder / "a.tar", samples)
        loader = wt.Loader(
            folder,
            {"image": wt.image(size=8), "label": wt.label()},
            batch_size=5,
            num_workers=workers,
        )
        offset = dict((name, at) for name, at, _ in loader.index.members(3))["png"]
        with pytest.raises(
            SampleError,
            match=rf"a.tar: 'k3', field 'png' at offset {offset}: image file is truncated",
        ):
            keys(loader)


def test_a_missing_field_and_a_bad_label_are_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k0", {"txt": b"x", "cls": b"1"}), ("k1", {"txt": b"x"})])
    with pytest.raises(
        SampleError, match="'k1', the sample at offset 2048: it has none of cls .but txt"
    ):
        keys(wt.Loader(tmp_path, {"label": wt.label()}, batch_size=1, shuffle=False))
    write_tar(tmp_path / "a.tar", [("k0", {"cls": b"cat"})])
    with pytest.raises(
        SampleError, match="'k0', field 'cls' at offset 512: 'cat' is not a whole number"
    ):
        keys(wt.Loader(tmp_path, {"label": wt.label()}, batch_size=1))


def damaged(folder: Path, bad: set[int], count: int = 40) -> Path:
    """Write a shard of images, some of them truncated."""
    samples: list[Sample] = []
    for i in range(count):
        data = picture(i, kind="JPEG")
        samples.append(
            (f"k{i:03d}", {"jpg": data[: len(data) // 2] if i in bad else data, "cls": b"%d" % i})
        )
    write_tar(folder / "a.tar", samples)
    return folder


PICTURE = {"image": wt.image(size=8), "label": wt.label()}


def picky(sample: dict[str, Any]) -> dict[str, Any]:
    if int(sample["cls"]) % 3 == 0:
        raise ValueError("a third is bad")
    return {"n": int(sample["cls"])}


def test_too_many_bad_samples_raise_an_error_with_reasons(tmp_path: Path) -> None:
    loader = wt.Loader(
        damaged(tmp_path, set(range(0, 40, 4))),
        PICTURE,
        batch_size=8,
        on_error="replace",
        max_errors=0.1,
    )
    with pytest.raises(
        SampleError,
        match=r"[5-9] of the 40 samples of epoch 0 are bad, more than max_errors=0.1.*[5-9] x jpg",
    ):
        keys(loader)


def test_the_error_for_all_bad_samples_names_requested_and_existing_fields(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "a.tar",
        [
            *[(f"k{i}", {"txt": b"x"}) for i in range(8)],
            ("k8", {"txt": b"x", "jpg": b"no picture"}),
        ],
    )
    loader = wt.Loader(
        tmp_path,
        {"image": wt.image(size=8)},
        batch_size=4,
        shuffle=False,
        on_error="replace",
        max_errors=1.0,
    )
    with pytest.raises(
        SampleError, match="'k0'.*it has none of jpg, jpeg, .*but txt.*No good sample was found"
    ):
        keys(loader)


def test_a_substitute_is_transformed_equally_in_threads_and_processes(shards: Path) -> None:
    torch.manual_seed(1)
    numbers = []
    for workers in (1, 2):
        loader = wt.Loader(
            shards,
            transform=picky_and_random,
            batch_size=1,
            num_workers=workers,
            on_error="replace",
            max_errors=0.5,
        )
        numbers.append([(batch["n"].item(), batch["drawn"].tolist()) for batch in loader])
        loader.close()
    assert numbers[0] == numbers[1]
    drawn = {}  # a substitute is transformed with its own random numbers each time
    for n, values in numbers[0]:
        assert drawn.setdefault(n, values) == values
    assert len(numbers[0]) == 21 > len(drawn) == 14
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(expected, torch.rand(1))


def picky_and_random(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        **picky(sample),
        "drawn": np.array([random.random(), np.random.rand(), torch.rand(1).item()]),
    }


def test_a_field_that_no_shard_has_is_refused_at_once(shards: Path) -> None:
    with pytest.raises(
        UsageError, match="field 'image' looks for jpg, png; these shards hold cls, txt"
    ):
        wt.Loader(shards, {"image": wt.image("jpg;png", size=8)})


@pytest.mark.parametrize("when", ["before", "while it is used"])
def test_samples_beyond_the_end_of_a_truncated_shard_are_replaced(
    tmp_path: Path, when: str
) -> None:
    """The other samples of that shard are delivered; no partial sample is delivered."""
    rows = ({"__key__": f"k{n:03d}", "bin": bytes([n]) * 3000} for n in range(90))
    index = wt.pack(rows, str(tmp_path / "s"), max_shard_samples=30, shuffle=False)
    cut = int(index.offsets.start[25] + 700)  # in the data of sample 25
    if when == "before":
        os.truncate(tmp_path / "s" / "train-000000.tar", cut)
    options: dict[str, Any] = {
        "batch_size": 6,
        "shuffle": False,
        "on_error": "replace",
        "max_errors": 0.1,
    }
    loader = wt.Loader(tmp_path / "s", **options)
    if when != "before":
        os.truncate(tmp_path / "s" / "train-000000.tar", cut)
    actual = [
        (key, data)
        for batch in loader
        for key, data in zip(batch["__key__"], batch["bin"], strict=True)
    ]
    report = loader.report()
    loader.close()
    assert all(data == bytes([int(key[1:])]) * 3000 for key, data in actual)
    assert {key for key, _ in actual} == {f"k{n:03d}" for n in range(90) if not 25 <= n < 30}
    assert len(actual) == 90
    assert [bad["key"] for bad in report["bad_samples"]] == [f"k{n:03d}" for n in range(25, 30)]
    assert "cannot be read" in report["bad_samples"][0]["reason"]
    strict = {**options, "on_error": "raise"}
    with pytest.raises(ShardError, match=r"train-000000.tar has \d+ bytes, its index says"):
        wt.Loader(tmp_path / "s", **strict)
    with pytest.raises(SampleError, match="more than max_errors=0.01"):
        list(wt.Loader(tmp_path / "s", **{**options, "max_errors": 0.01}))


def varied(sample: dict[str, Any]) -> dict[str, Any]:
    crop = v2.RandomResizedCrop(8)(torch.arange(300, dtype=torch.uint8).view(1, 15, 20))
    return {"crop": crop, "numpy": np.random.random(2), "python": random.random()}


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {"double": 2 * int(sample["cls"]), "name": sample["__key__"], "noise": torch.rand(2)}


def drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"n": int(sample["cls"]), "x": rng.random(3)}


def failing(sample: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("no such thing")


def test_global_generators_are_seeded_per_sample_in_worker_processes(shards: Path) -> None:
    def noise(workers: int) -> list[list[Any]]:
        loader = wt.Loader(shards, transform=varied, batch_size=4, num_workers=workers)
        actual = [
            [batch[name].tolist() for name in ("crop", "numpy", "python")]
            for _ in range(2)
            for batch in loader
        ]
        loader.close()
        return actual

    assert noise(1) == noise(3)
    drawn = [number for batch in noise(1) for number in batch[2]]
    assert len(set(drawn)) == len(drawn) == 40  # every sample and epoch has another number


def test_an_exception_of_a_transform_names_the_sample(shards: Path) -> None:
    with pytest.raises(SampleError, match="transform raised KeyError: 'no such thing'"):
        keys(wt.Loader(shards, transform=failing, batch_size=4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"shuffle_buffer": 0}, "shuffle_buffer=0"),
        ({"rank": 2, "world_size": 2}, "rank=2: must be >= 0 and below world_size=2"),
        ({"rank": 0}, "give both or none"),
        ({"fields": {"label": wt.label()}, "transform": double}, "fields and transform"),
        ({"batch_size": 100}, "21 samples cannot give 1 rank"),
        ({"fields": {"image": "jpg"}}, r"fields\['image'\]='jpg': must be a field"),
        ({"fields": {"image": wt.image}}, "must be a field"),
        ({"fields": ["image"]}, "must be a dict"),
        ({"multiprocessing_context": "x"}, "must be one of fork, forkserver, spawn"),
        ({"on_error": "skip"}, "must be one of raise, replace, mark"),
        ({"collate_fn": list}, "Give transform too"),
        ({"collate_fn": list, "fields": {"label": wt.label()}}, "Give transform too"),
        ({"collate_fn": 3, "transform": double}, "collate_fn=3: must be a function"),
        ({"patience": None}, "patience=None: must be a number of seconds >= 0"),
        ({"patience": float("nan")}, "patience=nan"),
        ({"patience": "60"}, "patience='60'"),
        ({"max_errors": None}, "max_errors=None"),
        ({"max_errors": "1%"}, "max_errors='1%'|max_errors=1%"),
        ({"max_errors": float("nan")}, "max_errors=nan"),
        ({"batch_size": None}, "batch_size=None: must be an integer >= 1"),
        ({"seed": None}, "seed=None: must be an integer"),
        ({"cache_limit": 0, "cache_dir": "c"}, "cache_limit=0: must be an integer >= 1"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(
    shards: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        wt.Loader(shards, **options)


@pytest.mark.parametrize("described", [wt.Loader, wt.Augmentation])
def test_help_describes_every_option(described: Any) -> None:
    options = list(inspect.signature(described).parameters)
    words = set(re.findall(r"\w+", described.__doc__))
    assert len(options) > 10
    assert not [name for name in options if name not in words]


def test_a_tiny_set_can_be_read_for_many_epochs(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "one", [1])
    for workers in (0, 1):
        loader = wt.Loader(folder, {"label": wt.label()}, batch_size=1, num_workers=workers)
        assert [batch["label"].tolist() for _ in range(40) for batch in loader] == [[0]] * 40
        loader.close()


def test_the_repr_of_a_loader_shows_its_contents(shards: Path) -> None:
    assert (
        "21 samples in 3 shards, 5 batches of 4 on rank 0 of 1, shuffle_buffer=168 holds about 0.0 MB"
        in repr(wt.Loader(shards, batch_size=4))
    )


@pytest.mark.skipif(
    kernels.library is not None,
    reason="Python does not see the system calls of compiled code; a test in tests/memory runs this",
)
def test_shards_are_read_forward_in_turn_with_large_reads(tmp_path: Path) -> None:
    """Offsets only grow within a shard, no byte is read twice, and reads are large."""
    for n in range(3):
        samples: list[Sample] = [(f"s{n}{i:05d}", {"bin": bytes(1400)}) for i in range(5000)]
        write_tar(tmp_path / f"b-{n}.tar", samples)
    index = wt.index(tmp_path)
    table = index.offsets
    expected = int(sum(table.stop - table.start))
    with recorded_reads(r"b-\d\.tar") as reads:
        loader = wt.Loader(index, batch_size=16, tail="keep", shuffle_buffer=200)
        assert sum(len(batch) for batch in keys(loader)) == 15_000
        loader.close()
    ends = list(itertools.accumulate(length for _, _, length in reads))
    epoch = reads[: ends.index(expected) + 1]  # the reader continues into the next epoch
    shards = [path for path, _, _ in epoch]
    assert len(list(itertools.groupby(shards))) == 3
    for _, group in itertools.groupby(epoch, lambda read: read[0]):
        shard_reads = [(offset, length) for _, offset, length in group]
        assert all(a + length == b for (a, length), (b, _) in itertools.pairwise(shard_reads))
        assert sum(length for _, length in shard_reads) / len(shard_reads) > 1 << 20


def test_an_image_field_reads_mixed_and_upper_case_extensions(tmp_path: Path) -> None:
    kinds = [("jpg", "JPEG"), ("JPEG", "JPEG"), ("png", "PNG"), ("PNG", "PNG")]
    write_tar(
        tmp_path / "a.tar",
        [(f"k{i}", {name: picture(i, kind=kind)}) for i, (name, kind) in enumerate(kinds)],
    )
    batch = next(
        iter(
            wt.Loader(
                tmp_path, {"image": wt.image("jpg;jpeg;png", size=8)}, batch_size=4, shuffle=False
            )
        )
    )
    assert batch["image"].shape == (4, 3, 8, 8)
    assert len({int(image.sum()) for image in batch["image"]}) == 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_interrupted_loops_leave_no_threads_or_processes(pictures: Path, num_workers: int) -> None:
    loader = wt.Loader(pictures, FIELDS, batch_size=4, num_workers=num_workers)
    for _ in loader:
        break
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        for _ in loader:
            break
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    with pytest.raises(ZeroDivisionError):
        list(1 // 0 for _ in loader)
    loader.close()
    assert not os.path.exists("/dev/shm") or not [
        name for name in os.listdir("/dev/shm") if "wdstrain" in name
    ]


class Opaque:
    names = ("cls",)
    example = None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        return lambda: 1


def test_a_value_that_cannot_be_pickled_raises_and_does_not_hang(shards: Path) -> None:
    with pytest.raises(SampleError, match="cannot be sent from a worker process.*num_workers=0"):
        keys(wt.Loader(shards, {"x": Opaque()}, batch_size=4, num_workers=1))
    assert len(keys(wt.Loader(shards, {"x": Opaque()}, batch_size=4))) == 5


def test_an_example_must_be_a_dict(shards: Path) -> None:
    with pytest.raises(
        SampleError, match="transform returned tuple; an example must be a dict.*collate_fn"
    ):
        keys(wt.Loader(shards, transform=lambda sample: (1, 2), batch_size=4))


def ragged(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Return as many ones as the class of the sample, and None for the classes 5, 12 and 19."""
    number = int(sample["cls"])
    return None if number % 7 == 5 else {"x": torch.ones(number + 1)}


def as_pair(sample: dict[str, Any]) -> tuple[Any, int]:
    output = ragged(sample)
    if output is None:
        raise ValueError("left out")
    return output["x"], int(sample["cls"])


def padded(examples: list[tuple[Any, int]]) -> dict[str, Any]:
    values, numbers = zip(*examples, strict=True)
    return {
        "x": torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True),
        "n": torch.tensor(numbers),
        "examples": examples,
    }


def test_errors_for_none_and_ragged_values_name_the_next_step(shards: Path) -> None:
    with pytest.raises(
        SampleError, match=r"returned None.*--where\)\. on_error='replace' goes on without it"
    ):
        keys(wt.Loader(shards, transform=ragged, batch_size=1))
    for on_error in ("raise", "replace"):
        loader = wt.Loader(
            shards, transform=ragged, batch_size=4, shuffle=False, on_error=on_error, max_errors=1
        )
        with pytest.raises(
            SampleError,
            match="a batch that begins with.*cannot be stacked: stack expects.*collate_fn",
        ) as caught:
            keys(loader)
        assert "on_error" not in str(caught.value)
        assert "No good sample" not in str(caught.value)
        loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_makes_the_batches(shards: Path, num_workers: int) -> None:
    def make() -> wt.Loader:
        return wt.Loader(
            shards,
            transform=as_pair,
            collate_fn=padded,
            batch_size=4,
            num_workers=num_workers,
            on_error="replace",
            max_errors=0.5,
            tail="keep",
        )

    loader = make()
    batches = list(wt.to_device(loader, "cpu"))
    assert [len(batch["n"]) for batch in batches] == [4, 4, 4, 4, 4, 1]
    for batch in batches:
        assert [int(key[1:]) for key in batch["__key__"]] == batch["n"].tolist()
        assert (batch["x"].sum(1) == batch["n"] + 1).all()
        assert all(torch.equal(x, torch.ones(n + 1)) for x, n in batch["examples"])
    assert loader.report()["bad"] == 3
    state = None
    for step, _batch in enumerate(loader):
        if step == 1:
            state = loader.state_dict()
            break
    loader.close()
    assert state is not None
    resumed, copied = make(), pickle.loads(pickle.dumps(loader))
    resumed.load_state_dict(state)
    uninterrupted = [batch["n"].tolist() for batch in loader.epoch(1, until=2)]
    assert [batch["n"].tolist() for batch in resumed] == uninterrupted[2:]
    assert [batch["n"].tolist() for batch in copied.epoch(1, until=2)] == uninterrupted
    for each in (loader, resumed, copied):
        each.close()


def broken(examples: list[Any]) -> Any:
    raise KeyError("no such value")


def a_tuple(examples: list[Any]) -> Any:
    return (1, 2)


@pytest.mark.parametrize(
    ("collate_fn", "words"),
    [
        (broken, "collate_fn raised KeyError: 'no such value'"),
        (a_tuple, "it returned tuple; a batch must be a dict of values by name"),
    ],
)
def test_an_error_in_collate_fn_names_the_function(
    shards: Path, collate_fn: Any, words: str
) -> None:
    for num_workers in (0, 1):
        loader = wt.Loader(
            shards, transform=double, collate_fn=collate_fn, batch_size=4, num_workers=num_workers
        )
        with pytest.raises(SampleError, match=words):
            keys(loader)
        loader.close()


class OwnField:
    names = ("cls",)
    example = None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> Any:
        return 1


@pytest.mark.parametrize(
    "field",
    [wt.image(), wt.image(size=8), wt.label(), wt.number("x"), wt.text(), wt.array(), OwnField()],
)
def test_a_class_with_the_field_protocol_is_a_field(field: Any) -> None:
    assert isinstance(field, wt.Field)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_does_not_change_threads_and_random_state_of_torch(
    shards: Path, num_workers: int
) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    loader = wt.Loader(shards, {"label": wt.label()}, batch_size=4, num_workers=num_workers)
    keys(loader)
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == threads
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [threads]
    loader.close()


class CountsThreads:
    """A field that computes with torch and returns the number of threads of torch."""

    names, example = ("txt",), None

    def read(self, name: str, data: memoryview, out: Any, draws: Any) -> int:
        torch.nn.functional.interpolate(torch.rand(1, 3, 64, 64), (32, 32))
        return torch.get_num_threads()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_decoder_computes_on_one_core(shards: Path, num_workers: int) -> None:
    """Each core has a decoder, so torch threads in a decoder would contend for the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        loader = wt.Loader(
            shards, {"threads": CountsThreads()}, batch_size=4, num_workers=num_workers
        )
        assert {count for batch in loader for count in batch["threads"]} == {1}
        assert torch.get_num_threads() == 3
        loader.close()
    finally:
        torch.set_num_threads(threads)


def test_state_dict_returns_the_loaded_state_until_the_loop_begins(shards: Path) -> None:
    loader = wt.Loader(shards, batch_size=4)
    state = {**loader.state_dict(), "epoch": 4, "step": 3}
    loader.load_state_dict(state)
    batches = iter(loader)
    assert loader.state_dict() == state
    loader.set_epoch(4)
    assert loader.state_dict() == state
    assert len(list(batches)) == 2
    for wrong in (
        {**state, "step": 99},
        {**state, "epoch": "x"},
        {k: v for k, v in state.items() if k != "epoch"},
    ):
        with pytest.raises(UsageError, match="this state holds no position|must be below 5"):
            loader.load_state_dict(wrong)


def test_worker_processes_deliver_the_same_tensors_as_threads(tmp_path: Path) -> None:
    """Small tensors are sent in the message, large ones as shared memory."""
    shards = write_shards(tmp_path / "s", [8])

    def transform(sample: dict[str, Any]) -> dict[str, torch.Tensor]:
        number = torch.tensor(int(sample["cls"]))
        kinds = (
            torch.bool,
            torch.uint8,
            torch.int16,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.complex64,
        )
        of_kinds = {str(kind): (number + torch.arange(6).view(2, 3)).to(kind) for kind in kinds}
        return {
            **of_kinds,
            "scalar": number,
            "part": torch.arange(20)[number::3][:3],
            "large": torch.full((100_000,), int(number)),
        }

    options: dict[str, Any] = {
        "transform": transform,
        "batch_size": 4,
        "multiprocessing_context": "fork",
    }
    in_threads, in_processes = (
        list(wt.Loader(shards, num_workers=workers, **options)) for workers in (0, 2)
    )
    for batch, process_batch in zip(in_threads, in_processes, strict=True):
        assert batch.keys() == process_batch.keys()
        for name in batch.keys() - {"__key__"}:
            assert batch[name].dtype == process_batch[name].dtype
            assert torch.equal(batch[name], process_batch[name])
            process_batch[name][0] = 0  # the caller owns the tensor and may write to it


@pytest.mark.parametrize(
    ("context", "workers"), quick_and_slow([("fork", 3), ("spawn", 1), ("forkserver", 1)], 2)
)
def test_every_start_method_delivers_the_pixels_of_threads(
    pictures: Path, context: Any, workers: int
) -> None:
    """Random crops included, over two epochs."""

    def epochs(**options: Any) -> list[Any]:
        loader = wt.Loader(pictures, FIELDS, batch_size=8, shuffle_buffer=11, **options)
        actual = [
            (b["__key__"], b["label"].tolist(), b["text"], b["image"].clone())
            for _ in range(2)
            for b in loader
        ]
        loader.close()
        return actual

    in_processes = epochs(num_workers=workers, multiprocessing_context=context)
    for in_thread, in_process in zip(epochs(), in_processes, strict=True):
        assert in_thread[:3] == in_process[:3]
        assert torch.equal(in_thread[3], in_process[3])
    image = in_processes[0][3]
    assert (image.shape, image.dtype) == ((8, 3, 16, 20), torch.uint8)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_the_report_counts_padded_rows_and_samples_that_are_left_out(shards: Path) -> None:
    for tail, counts in (("drop", (0, 5)), ("pad", (3, 0))):
        loader = wt.Loader(shards, batch_size=8, tail=tail)
        keys(loader)
        assert (loader.report()["padded"], loader.report()["left_out"]) == counts


# --- programs -------------------------------------------------------------------------------------

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

HARDLY_BEGUN = """
    import os, pathlib, signal, sys, time
    import wdstrain as wt

    signal.signal(signal.SIGTERM, lambda *_: None)  # training also handles it, to write a checkpoint
    os.register_at_fork(after_in_child=lambda: time.sleep(1))  # delay the start of workers
    loader = wt.Loader(sys.argv[1], {"label": wt.label()}, batch_size=2, num_workers=2, multiprocessing_context="fork")
    for path in pathlib.Path(sys.argv[1]).glob("*.tar"):
        path.unlink()
    try:
        next(iter(loader))
    except wt.WdstrainError as error:
        print("No such file" in str(error))
"""

OTHERS_CHILD = """
    import multiprocessing, os, signal, sys, time
    import wdstrain as wt

    others = []

    def start_another():  # another thread starts a process while the loader starts workers
        if not others:
            others.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)))
            others[0].start()
            signal.raise_signal(signal.SIGINT)

    loader = wt.Loader(sys.argv[1], {"label": wt.label()}, batch_size=2, num_workers=2, multiprocessing_context="fork")
    os.register_at_fork(after_in_parent=start_another)
    try:
        next(iter(loader))
    except KeyboardInterrupt:
        print("interrupted")
    print("alive" if others[0].is_alive() else "killed", len(multiprocessing.active_children()))
    others[0].kill()
"""


@pytest.mark.parametrize(
    ("program", "out"),
    [
        pytest.param(COLLECTING, "done\n", id="a loader that its own thread collects"),
        pytest.param(HARDLY_BEGUN, "True\n", id="workers that start when the first read fails"),
        pytest.param(OTHERS_CHILD, "interrupted\nalive 1\n", id="an interrupted start of workers"),
    ],
)
def test_a_program_ends_and_leaves_other_processes_alone(
    shards: Path, program: str, out: str
) -> None:
    done = ended(program, shards)
    assert (done.status, done.out) == (0, out), done.err


ENDLESS = """
    import sys, multiprocessing
    import wdstrain as wt

    loader = wt.Loader(sys.argv[1], {"label": wt.label()}, batch_size=2, num_workers=2, multiprocessing_context="fork")
    next(iter(loader))
    print(*[child.pid for child in multiprocessing.active_children()])
    while True:
        list(loader)
"""


@pytest.mark.parametrize("sent", quick_and_slow([signal.SIGKILL, signal.SIGINT], 1))
def test_workers_end_with_their_parent(shards: Path, sent: signal.Signals) -> None:
    program = Program(ENDLESS, shards)
    workers = [os.pidfd_open(int(word)) for word in program.out.readline().split()]
    assert len(workers) == 2
    os.kill(program.pid, sent)
    program.end()
    for worker in workers:
        assert select.select([worker], [], [], 60)[0]  # readable when the process has ended
        os.close(worker)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "wdstrain"))]
