"""Workloads that `run.py` disturbs, each with a check of the files it may leave at any moment."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import wdstrain as wt
from tests.conftest import write_class_folder, write_tar
from tests.fault_injection.process_faults import WrongOutcome, inside, typed
from wdstrain.errors import WdstrainError
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index, scan
from wdstrain.storage.files import disk_errors
from wdstrain.training import checkpoint
from wdstrain.training.checkpoint import BEST, FORMAT, LAST, read_checkpoint, write_checkpoint
from wdstrain.training.train import train

BLOCK = 16 << 10  # of a cache, so that small shards have several


class Work:
    """Work that writes into a folder `place`. `shared`: a folder that all repetitions share."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared

    def lay(self, place: Path) -> None:
        """Make the files that exist before."""
        place.mkdir(parents=True)

    def run(self, place: Path) -> None:
        raise NotImplementedError

    def look(self, place: Path) -> None:
        """Raise WrongOutcome if a file with its final name is incomplete or wrong."""

    def again(self, place: Path) -> None:
        """Repeat the work as a user does after a fault."""
        self.run(place)

    def resume(self, place: Path) -> None:
        """Repeat the work beside another that does it, too."""
        self.again(place)

    def end(self, place: Path) -> None:
        """Raise WrongOutcome unless the files equal those of an undisturbed run."""


class Converting(Work):
    """A conversion by the command line. over: it replaces another set."""

    def __init__(
        self, shared: Path, kind: str = "folder", jobs: int = 1, *, over: bool = False
    ) -> None:
        super().__init__(shared)
        self.jobs, self.over = jobs, over
        images = str(write_class_folder(shared / "in", {"cat": 30, "dog": 30}, "jpg"))
        np.save(shared / "x.npy", np.arange(60 * 200).reshape(60, 200))
        np.save(shared / "old.npy", np.arange(50 * 100).reshape(50, 100))
        words = {
            "folder": ["folder", images],
            "resized": ["folder", images, "--resize", "8"],
            "arrays": ["arrays", "--field", f"x={shared / 'x.npy'}"],
        }
        self.words = [*words[kind], "--max-shard-samples", "12"]
        self.new = converted(shared / "new", *self.words)
        self.old: dict[str, bytes] = {}
        if over:
            array = f"x={shared / 'old.npy'}"
            words_of_old = ["arrays", "--field", array, "--max-shard-samples", "7"]
            self.old = converted(shared / "old", *words_of_old)

    def lay(self, place: Path) -> None:
        place.mkdir(parents=True)
        if self.over:
            shutil.copytree(self.shared / "old", place / "out")

    def convert(self, place: Path, *words: str) -> None:
        typed("convert", *self.words, str(place / "out"), *words)

    def run(self, place: Path) -> None:
        self.convert(place, "--num-workers", str(self.jobs), *["--overwrite"] * self.over)

    def look(self, place: Path) -> None:
        out = place / "out"
        contents = visible(out) if out.exists() else {}
        for name, data in contents.items():
            if name.endswith(".tar") and data not in (self.new.get(name), self.old.get(name)):
                raise WrongOutcome(f"{name} is neither that of the old set nor that of the new one")
        for address in (str(out), f"{out}/*.tar"):
            if opened(address) is not None and contents not in (self.old, self.new):
                raise WrongOutcome(f"{address} opens, neither old nor new: {sorted(contents)}")
        if self.over and not is_decided(out) and opened(str(out)) is None:
            raise WrongOutcome("the old set cannot be opened, and nothing is put in its place")

    def again(self, place: Path) -> None:
        begun = (place / "out" / ".unfinished").exists()
        how = "--resume" if begun or not self.over else "--overwrite"
        try:
            self.convert(place, "--num-workers", "1", how)
        except WdstrainError as error:  # killed before it began: the sentence says what to add
            if "replace it with --overwrite" not in str(error) or not self.over:
                raise
            self.convert(place, "--num-workers", "1", "--overwrite")

    def resume(self, place: Path) -> None:
        self.convert(place, "--resume")

    def end(self, place: Path) -> None:
        check_same(visible(place / "out"), self.new)
        hidden = [name for name in os.listdir(place / "out") if name.startswith(".")]
        if hidden:
            raise WrongOutcome(f"left behind: {hidden}")


class Indexing(Work):
    """`wdstrain index` for shards with an outdated index: a shard was removed."""

    def __init__(self, shared: Path) -> None:
        super().__init__(shared)
        write_class_folder(shared / "in", {"cat": 30, "dog": 30}, "jpg")
        words = ["folder", str(shared / "in"), "--max-shard-samples", "12"]
        converted(shared / "set", *words)
        self.lay(shared / "undisturbed")
        done(lambda: self.run(shared / "undisturbed"))
        self.new = visible(shared / "undisturbed" / "set")

    def lay(self, place: Path) -> None:
        shutil.copytree(self.shared / "set", place / "set")
        os.unlink(place / "set" / "train-000002.tar")

    def run(self, place: Path) -> None:
        typed("index", str(place / "set"))

    def look(self, place: Path) -> None:
        try:
            index = open_index(str(place / "set"))
        except WdstrainError as error:
            if "train-000002.tar is in the index but cannot be found" not in str(error):
                raise WrongOutcome(f"neither the old index nor the new one: {error}") from error
        else:
            check_index(index)
            if not index.offsets.has_checksums:
                raise WrongOutcome("the checksums are lost")

    def end(self, place: Path) -> None:
        check_same(visible(place / "set"), self.new)


class Remembering(Work):
    """A scan over foreign shards, which is cached."""

    def __init__(self, shared: Path) -> None:
        super().__init__(shared)
        foreign(shared / "set")

    def lay(self, place: Path) -> None:
        shutil.copytree(self.shared / "set", place / "set")

    def run(self, place: Path) -> None:
        self.look(place)

    def look(self, place: Path, note: Callable[[str], object] = lambda text: None) -> None:
        os.environ["XDG_CACHE_HOME"] = str(place / "home")  # of this child
        check_index(open_index(str(place / "set"), note=note))

    def end(self, place: Path) -> None:
        notes = list[str]()
        self.look(place, notes.append)
        if notes:
            raise WrongOutcome(f"it was not remembered: {notes}")


class Filling(Work):
    options: ClassVar[dict[str, Any]] = {"batch_size": 16, "shuffle_buffer": 40}

    def __init__(self, shared: Path, url: str) -> None:
        super().__init__(shared)
        self.url = url
        self.shards = {path.read_bytes() for path in (shared / "served").glob("*.tar")}
        self.order = done(lambda: epoch(wt.Loader(shared / "served", **self.options)))

    @staticmethod
    def serve_from(folder: Path) -> None:
        bits = random.Random(0)
        samples = (
            {"__key__": f"k{n:03d}", "bin": bits.randbytes(1500 + n), "cls": n % 3}
            for n in range(160)
        )
        wt.pack(samples, folder, max_shard_samples=40)

    def run(self, place: Path) -> None:
        os.environ |= {"WDSTRAIN_RANGE_SIZE": str(BLOCK), "WDSTRAIN_RETRY_PAUSE": "0.001"}
        if epoch(wt.Loader(self.url, **self.options, cache_dir=place / "cache")) != self.order:
            raise WrongOutcome("other samples came")

    def look(self, place: Path) -> None:
        for path in (place / "cache").rglob("*.tar"):
            if path.read_bytes() not in self.shards:
                raise WrongOutcome(f"{path.name} in the cache is none of the shards")

    def end(self, place: Path) -> None:
        self.look(place)
        names = sorted(path.name for path in (place / "cache").rglob("*"))
        whole = [name for name in names if name.endswith(".tar")]
        if len(whole) != len(self.shards) or any(".part" in name for name in names):
            raise WrongOutcome(f"the cache holds {names}")


class Saving(Work):
    """Checkpoints of six steps, of which every second step is the best so far."""

    steps = 6

    def run(self, place: Path) -> None:
        (place / "c").mkdir(exist_ok=True)
        state, refused = checkpoint.read_last(str(place / "c"))
        if refused:
            raise WrongOutcome(f"checkpoints are not whole: {refused}")
        with disk_errors(str(place / "c")):  # as a resumed run begins
            for path in (place / "c").glob(".*.tmp"):
                path.unlink()
        for step in range(state["position"] + 1 if state else 1, self.steps + 1):
            model = {name: torch.full((64, 64), float(step)) for name in ("weight", "bias")}
            more = {"config": {}, "task": {}, "position": step}
            saved = {"format": FORMAT, "model": model, **more}
            write_checkpoint(str(place / "c"), saved, step, keep=2, best=step % 2 == 0)

    def lay(self, place: Path) -> None:
        (place / "c").mkdir(parents=True)

    def look(self, place: Path) -> None:
        """Check that each checkpoint is whole, and that the best one so far has its name."""
        steps = dict[str, int]()
        for path in (place / "c").glob("*.pt"):
            state = read_checkpoint(str(path))
            step = steps[path.name] = state["position"]
            if any((value != step).any() for value in state["model"].values()):
                raise WrongOutcome(f"{path.name} is mixed of several steps")
            if path.name.startswith("step-") and path.name != f"step-{step:08d}.pt":
                raise WrongOutcome(f"{path.name} is of step {step}")
        if BEST in steps and (steps[BEST] % 2 or (LAST not in steps and len(steps) < 2)):
            raise WrongOutcome(f"best.pt is of step {steps[BEST]}")
        if steps.get(LAST, 0) >= 2 and BEST not in steps:
            raise WrongOutcome("the best is behind last.pt and has no name")

    def end(self, place: Path) -> None:
        self.look(place)
        folder, last = str(place / "c"), self.steps
        names = (LAST, BEST, *checkpoint.names(folder))
        kept = {name: read_checkpoint(f"{folder}/{name}")["position"] for name in names}
        expected = {f"step-{step:08d}.pt": step for step in (last - 1, last)}
        kept.pop(f"step-{last - 2:08d}.pt", None)  # the next save would have taken it away
        is_left = any(name.startswith(".") for name in os.listdir(folder))
        if kept != {LAST: last, BEST: last, **expected} or is_left:
            raise WrongOutcome(f"left are {kept} and {sorted(os.listdir(folder))}")


class Training(Work):
    """A run of two epochs with checkpoints in between."""

    options: ClassVar[dict[str, Any]] = {
        **{"model": "small", "epochs": 2, "batch_size": 8, "image_size": 16, "optimizer": "sgd"},
        **{"lr": 0.05, "deterministic": True, "checkpoint_every": 3},
    }

    def __init__(self, shared: Path) -> None:
        super().__init__(shared)
        write_class_folder(shared / "in", {"cat": 30, "dog": 30}, "jpg")
        words = ["--split", "train=0.6,val=0.4", "--stratify", "label"]
        converted(shared / "set", "folder", str(shared / "in"), *words)
        done(lambda: self.run(shared / "undisturbed"))
        self.wanted = done(lambda: self.result(shared / "undisturbed"))

    def run(self, place: Path, **more: bool) -> None:
        train(str(self.shared / "set"), place / "run", **self.options, **more)

    def again(self, place: Path) -> None:
        self.run(place, resume=True)

    def look(self, place: Path) -> None:
        for path in (place / "run" / "checkpoints").glob("*.pt"):
            read_checkpoint(str(path))

    def result(self, place: Path) -> dict[str, Any]:
        """Return the weights, the metrics without times, and the number of their lines."""
        folder, timed = place / "run" / "checkpoints", ("seconds", "per_second", "stall", "verdict")
        states = {name: read_checkpoint(str(folder / name)) for name in (LAST, BEST)}
        weights = {
            (name, part): value.numpy().tobytes()
            for name, state in states.items()
            for part, value in state["model"].items()
        }
        metrics = [
            {name: value for name, value in line.items() if not name.endswith(timed)}
            for line in states[LAST]["state"]["history"]
        ]
        lines = len((place / "run" / "metrics.jsonl").read_text().splitlines())
        return {"weights": weights, "metrics": repr(metrics), "lines": lines}

    def end(self, place: Path) -> None:
        result = self.result(place)
        wrong = [name for name in result if result[name] != self.wanted[name]]
        if wrong:
            shown = {name: (result[name], self.wanted[name]) for name in ("metrics", "lines")}
            raise WrongOutcome(f"it came to other {wrong}: {shown}")
        left = [path.name for path in (place / "run").rglob("*.tmp")]
        if left:
            raise WrongOutcome(f"left behind: {left}")


# --- helpers ---


def done(work: Callable[[], Any]) -> Any:
    return inside(work).need("done").value


def converted(out: Path, *words: str) -> dict[str, bytes]:
    done(lambda: typed("convert", *words, str(out)))
    return visible(out)


def foreign(folder: Path, shards: int = 3, samples: int = 40) -> None:
    """Write shards without an index: a sample has its number in its key, its class, its bytes."""
    for shard in range(shards):
        numbers = range(shard * samples, (shard + 1) * samples)
        fields = [{"bin": b"%06d" % n * 100, "cls": b"%d" % (n % 7)} for n in numbers]
        keys = [f"s{n:06d}" for n in numbers]
        write_tar(folder / f"part-{shard:03d}.tar", list(zip(keys, fields, strict=True)))


def epoch(loader: wt.Loader, number: int = 0) -> list[tuple[str, bytes, bytes]]:
    with closing(loader):
        batches = [(b["__key__"], b["bin"], b["cls"]) for b in loader.epoch(number)]
    return [item for columns in batches for item in zip(*columns, strict=True)]


def opened(address: str) -> Index | None:
    """Return an index as a reader opens it, or None if it is refused with an error."""
    try:
        return open_index(address)
    except WdstrainError as error:
        if not str(error).strip() or "\n" in str(error).strip():
            raise WrongOutcome(f"no sentence: {error!r}") from error
        return None


def check_index(index: Index) -> None:
    """Raise WrongOutcome unless an index equals a scan over its shards."""
    if index.offsets.differences(scan(shard.path for shard in index.shards).offsets):
        raise WrongOutcome("the index is not true of its shards")


def is_decided(out: Path) -> bool:
    return (out / ".unfinished" / "commit.json").exists()


def visible(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by name, except hidden files."""
    paths = [path for path in sorted(folder.glob("[!.]*")) if path.is_file()]
    return {path.name: path.read_bytes() for path in paths}


def check_same(actual: Mapping[str, bytes], expected: Mapping[str, bytes]) -> None:
    """Raise WrongOutcome unless the files of a folder are those that are expected."""
    names = sorted(actual.keys() | expected.keys())
    others = [name for name in names if actual.get(name) != expected.get(name)]
    if others:
        raise WrongOutcome(f"other bytes came out: {others}")
