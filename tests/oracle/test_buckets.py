"""Random cases of buckets, compared with counts that need no plan.

Every case is a function of its seed, which pytest prints as the name of the test.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.support.drawn_cases import check_block

CASES, BLOCK = 12, 60
SHAPES = {1: (8, 8), 5: (8, 12), 6: (12, 8), 17: (8, 24), 30: (24, 8)}  # of images, by length
Epoch = list[list[int]]  # sample numbers by step and row


@dataclass
class Case:
    """A random set, its options, and the bucket and batch size on a rank that each sample has."""

    rng: random.Random
    folder: Path
    options: dict[str, Any]
    buckets: list[Any]
    sizes: dict[Any, int]
    world_size: int

    def loader(self, rank: int = 0, **more: Any) -> wt.Loader:
        ranks = {"rank": rank, "world_size": self.world_size}
        return wt.Loader(self.folder, {"n": wt.number("n")}, **{**self.options, **ranks, **more})

    def read(self, rank: int = 0, epoch: int = 0, start: int = 0, **more: Any) -> Epoch:
        with self.loader(rank, **more) as loader:
            batches = [batch["n"].int().tolist() for batch in loader.epoch(epoch, start=start)]
            assert len(batches) + start == len(loader)
        return batches

    def resume(self, state: dict[str, Any], rank: int = 0, **more: Any) -> Epoch:
        with self.loader(rank, **more) as loader:
            loader.load_state_dict(state)
            return [batch["n"].int().tolist() for batch in loader]


def draw_case(seed: int, folder: Path) -> Case | None:
    """Return a random case, or None if it is one that must be refused."""
    rng = random.Random(seed)
    lanes_per_rank, world_size = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3))
    lengths = [rng.choice((1, 5, 6, 17, 30)) for _ in range(rng.randrange(20, 400))]
    if rng.random() < 0.3:
        lengths.sort()
    images = {x: b"P6 %d %d 255 " % SHAPES[x][::-1] + bytes(24 * max(SHAPES[x])) for x in SHAPES}
    samples = (
        {"__key__": f"{n:04d}", "json": {"n": n, "len": x}, "ppm": images[x]}
        for n, x in enumerate(lengths)
    )
    wt.pack(samples, folder, shuffle=False, max_shard_samples=rng.choice((7, 50, 1000)))
    batch_size, edges = lanes_per_rank * rng.randrange(1, 5), [rng.choice((5, 6, 20)), 30]
    column = rng.choice(["len", "aspect", {"len": edges}, {"len": [*edges, 99]}])
    lanes = rng.choice((None, world_size)) if lanes_per_rank == 1 else lanes_per_rank * world_size
    options: dict[str, Any] = {"batch_size": batch_size, "buckets": column, "lanes": lanes}
    options |= {"shuffle": rng.random() < 0.8, "shuffle_buffer": rng.choice((None, 1, 5, 60))}
    options["seed"] = rng.randrange(3)
    buckets: list[Any] = list(lengths)
    if column == "aspect":
        wt.index(folder, columns=["ppm.width", "ppm.height"])
        options["pixels"] = 4096
    if isinstance(column, dict):
        buckets = [edges[length > edges[0]] for length in lengths]
    sizes = dict.fromkeys(buckets, batch_size)
    if isinstance(column, dict) and rng.random() < 0.6:
        options["budget"] = rng.choice((60, 100, 400))
        for edge in sizes:
            most = min(batch_size, options["budget"] // edge)
            sizes[edge] = most - most % lanes_per_rank
    case = Case(rng, folder, options, buckets, sizes, world_size)
    counts = Counter(buckets)
    if all(0 < sizes[name] * world_size <= count for name, count in counts.items()):
        return case
    if column != "aspect":  # there a shape of few images has the bucket of another one
        with pytest.raises(wt.UsageError, match=r"buckets cannot fill one batch|budget="):
            case.loader()
    return None


def check_case(seed: int, folder: Path) -> None:
    """Check an epoch on all ranks, and that workers, a resume and other world sizes keep it."""
    case = draw_case(seed, folder / "set")
    if case is None:
        return
    ranks = [case.read(rank) for rank in range(case.world_size)]
    check_epoch(case, ranks)
    rank, start = case.rng.randrange(case.world_size), case.rng.randrange(len(ranks[0]))
    assert case.read(rank, start=start) == ranks[rank][start:]
    later = case.read(rank, epoch=3, num_workers=1, multiprocessing_context="fork")
    assert later == case.read(rank, epoch=3)
    assert len(later) == len(ranks[0])
    with case.loader(rank) as loader:
        list(islice(loader, start))
        state = loader.state_dict()
    assert case.resume(state, rank) == ranks[rank][start:]
    without: dict[str, Any] = dict.fromkeys(("buckets", "budget", "pixels"))
    with pytest.raises(wt.UsageError, match="buckets were given"):
        case.resume(state, rank, **without)
    if case.options["lanes"] is not None:  # one rank with these lanes takes the same steps
        more = {
            name: case.options[name] * case.world_size
            for name in ("batch_size", "budget")
            if name in case.options
        }
        case.world_size = 1
        steps = [sorted(chain.from_iterable(own)) for own in zip(*ranks, strict=True)]
        assert [sorted(step) for step in case.read(**more)] == steps
        assert [sorted(step) for step in case.resume(state, **more)] == steps[start:]


def check_epoch(case: Case, ranks: list[Epoch]) -> None:
    """Check the bucket and the size of each batch, and how often samples and buckets occur."""
    for own in zip(*ranks, strict=True):
        names = {case.buckets[number] for step in own for number in step}
        assert len(names) == 1, "a step has one bucket, on all ranks"
        assert {len(step) for step in own} == {case.sizes[names.pop()]}
    delivered = [number for own in zip(*ranks, strict=True) for step in own for number in step]
    assert len(set(delivered)) == len(delivered), "a sample occurs twice"
    is_plain = not case.options["shuffle"] and case.world_size == 1
    for name, count in Counter(case.buckets).items():
        of_bucket = [number for number in delivered if case.buckets[number] == name]
        assert len(of_bucket) == count - count % (case.sizes[name] * case.world_size)
        if is_plain and case.options["lanes"] in (None, 1):
            assert of_bucket == sorted(of_bucket), "not in the order of the files"


@pytest.mark.parametrize("seed", range(CASES))
def test_every_batch_has_one_bucket_and_every_sample_occurs_once(seed: int, tmp_path: Path) -> None:
    check_case(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_batches_have_one_bucket_and_every_sample_occurs_once(tmp_path: Path) -> None:
    check_block(check_case, 0, BLOCK, tmp_path)


LENGTHS = [3, 9, 9, 40, 12, 6, 7, 30]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"buckets": "none"}, "no column 'none'"),
    ({"buckets": 3}, r"buckets=3: must be the name of a column, or a dict of one column"),
    ({"buckets": {"len": [9, 5]}}, "ascending"),
    ({"buckets": {"len": ["a"]}}, "ascending"),
    ({"buckets": {"len": [10, 20]}}, "2 samples are above the last edge 20, the first of them '3'"),
    ({"buckets": {"word": [10, 20]}}, "edges need a column of numbers; this one holds"),
    ({"buckets": "some"}, "1 of 8 samples have no value"),
    ({"buckets": "len"}, r"6 of 7 buckets cannot fill one batch on each rank \(len 3 has 1 of 2"),
    ({"buckets": {"len": [10, 50]}, "budget": 9}, "1 sample at least, of up to 10 each"),
    ({"buckets": "len", "budget": 9}, "for buckets that are ranges"),
    ({"buckets": {"len": [50]}, "balance": "word"}, "buckets was given with weights or balance"),
    ({"buckets": {"len": [50]}, "tail": "keep"}, r"Use tail='drop'"),
    ({"buckets": {"len": [50]}, "lanes": 3}, "cannot be taken equally from 3 lanes"),
]


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lengths") / "set"
    rows = [{"len": x, "word": "ab"[n % 2], "some": 1} for n, x in enumerate(LENGTHS)]
    del rows[0]["some"]
    samples = ({"__key__": str(n), "json": row} for n, row in enumerate(rows))
    wt.pack(samples, folder, shuffle=False)
    return folder


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_wrong_buckets_are_refused(lengths: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(wt.UsageError, match=message):
        wt.Loader(lengths, **{"batch_size": 2, **options})


def test_a_mixture_has_no_buckets(lengths: Path) -> None:
    with pytest.raises(wt.UsageError, match="a mixture has no buckets"):
        wt.mix({"a": lengths, "b": lengths}, batch_size=2, buckets="len")
