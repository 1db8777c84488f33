"""Workloads that `run.py` disturbs, each with a check of the files it may leave at any moment."""

from __future__ import annotations

import io
import os
import random
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

import wdstrain as wt
from tests.fault_injection.process_faults import WrongOutcome, inside, typed
from wdstrain.errors import WdstrainError
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index, scan
from wdstrain.storage.files import disk_errors
from wdstrain.training import checkpoint
from wdstrain.training.checkpoint import BEST, FORMAT, LAST, read_checkpoint, write_checkpoint
from wdstrain.training.train import train

BLOCK = 16 << 10  # of a cache, so that small shards have several

_TIMED = ("seconds", "samples_per_second", "stall", "verdict")


class Work:
    """Work that writes into a folder `place`. `shared`: a folder that all repetitions share."""

    title = ""

    def __init__(self, shared: Path) -> None:
        self.shared = shared

    def lay(self, place: Path) -> None:
        """Make the files that exist before."""
        place.mkdir(parents=True)

    def run(self, place: Path) -> None:
        """Do the work."""
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

    def reach(self, place: Path) -> str:
        """Return the progress: "before", "within" or "after" its writing."""
        raise NotImplementedError

    def reboot(self) -> None:
        """Change what a restart of the machine changes."""


# --- conversions ---


class Converting(Work):
    """A conversion by the command line."""

    def __init__(
        self, shared: Path, kind: str = "folder", jobs: int = 1, *, over: bool = False
    ) -> None:
        super().__init__(shared)
        self.title = f"convert {kind}" + f", {jobs} jobs" * (jobs > 1) + " over another set" * over
        self._kind, self._jobs, self._over = kind, jobs, over
        pictures(shared / "in", 60)
        np.save(shared / "x.npy", np.arange(60 * 200).reshape(60, 200))
        self.new = self._made(shared / "new", self._words)
        self.old: dict[str, bytes] = {}
        if over:
            np.save(shared / "old.npy", np.arange(50 * 100).reshape(50, 100))
            self._old_words = ["arrays", "--field", f"x={shared / 'old.npy'}"]
            self._old_words += ["--max-shard-samples", "7"]
            self.old = self._made(shared / "old", self._old_words)

    @property
    def _words(self) -> list[str]:
        words = ["folder", str(self.shared / "in")]
        if self._kind == "arrays":
            words = ["arrays", "--field", f"x={self.shared / 'x.npy'}"]
        resize = ["--resize", "8"] if self._kind == "resized" else []
        return [*words, *resize, "--max-shard-samples", "12"]

    @staticmethod
    def _made(out: Path, words: list[str]) -> dict[str, bytes]:
        inside(lambda: typed("convert", *words, str(out))).need("done")
        return visible(out)

    def lay(self, place: Path) -> None:
        place.mkdir(parents=True)
        if self._over:
            shutil.copytree(self.shared / "old", place / "out")

    def run(self, place: Path) -> None:
        more = ["--overwrite"] if self._over else []
        typed("convert", *self._words, str(place / "out"), "--num-workers", str(self._jobs), *more)

    def look(self, place: Path) -> None:
        out = place / "out"
        contents = visible(out) if out.exists() else {}
        for name, data in contents.items():
            if name.endswith(".tar") and data not in (self.new.get(name), self.old.get(name)):
                raise WrongOutcome(f"{name} is neither that of the old set nor that of the new one")
        for address in (str(out), f"{out}/*.tar"):
            if opened(address) is not None and contents not in (self.old, self.new):
                raise WrongOutcome(
                    f"{address} can be opened, and is neither the old set nor the new one: {sorted(contents)}"
                )
        if self._over and not is_decided(out) and opened(str(out)) is None:
            raise WrongOutcome(
                "the set that was there before cannot be opened, and nothing is being put in its place"
            )

    def again(self, place: Path) -> None:
        out = place / "out"
        begun = (out / ".unfinished").exists()
        words = ["convert", *self._words, str(out), "--num-workers", "1"]
        try:
            typed(*words, "--resume" if begun or not self._over else "--overwrite")
        except WdstrainError as error:  # it was killed before it had begun, and the old set is there: the sentence says what to add
            if "replace it with --overwrite" not in str(error) or not self._over:
                raise
            typed(*words, "--overwrite")

    def resume(self, place: Path) -> None:
        typed("convert", *self._words, str(place / "out"), "--resume")

    def end(self, place: Path) -> None:
        if visible(place / "out") != self.new:
            raise WrongOutcome(
                f"other bytes came out: {differing(visible(place / 'out'), self.new)}"
            )
        hidden = [name for name in os.listdir(place / "out") if name.startswith(".")]
        if hidden:
            raise WrongOutcome(f"left behind: {hidden}")

    def reach(self, place: Path) -> str:
        out = place / "out"
        if not out.exists() or (visible(out) == self.old and not (out / ".unfinished").exists()):
            return "before"
        return "after" if visible(out) == self.new and not is_decided(out) else "within"


# --- indexes ---


class Indexing(Work):
    """`wdstrain index` for shards with an outdated index: a shard was removed."""

    title = "index"

    def __init__(self, shared: Path) -> None:
        super().__init__(shared)
        pictures(shared / "in", 60)
        words = ["convert", "folder", str(shared / "in"), str(shared / "set")]
        inside(lambda: typed(*words, "--max-shard-samples", "12")).need("done")
        self.lay(shared / "undisturbed")
        inside(lambda: self.run(shared / "undisturbed")).need("done")
        self._old, self._new = visible(shared / "set"), visible(shared / "undisturbed" / "set")

    def lay(self, place: Path) -> None:
        place.mkdir(parents=True)
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
            true_of(index)
            if not index.offsets.has_checksums:
                raise WrongOutcome("the checksums are lost")

    def end(self, place: Path) -> None:
        if visible(place / "set") != self._new:
            others = differing(visible(place / "set"), self._new)
            raise WrongOutcome(f"another index came out: {others}")

    def reach(self, place: Path) -> str:
        contents = [visible(place / "set").get(name) for name in ("index.arrow", "index.json")]
        if contents == [self._new["index.arrow"], self._new["index.json"]]:
            return "after"
        old = [self._old["index.arrow"], self._old["index.json"]]
        return "before" if contents == old else "within"


class Remembering(Work):
    """A scan over foreign shards, which is cached."""

    title = "remembered walk"

    def __init__(self, shared: Path) -> None:
        super().__init__(shared)
        foreign(shared / "set")

    def lay(self, place: Path) -> None:
        place.mkdir(parents=True)
        shutil.copytree(self.shared / "set", place / "set")

    def run(self, place: Path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(place / "home")  # of this child
        true_of(open_index(str(place / "set")))

    def look(self, place: Path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(place / "home")
        true_of(open_index(str(place / "set")))

    def end(self, place: Path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(place / "home")
        reported: list[str] = []
        true_of(open_index(str(place / "set"), note=reported.append))
        if reported:
            raise WrongOutcome(f"it was not remembered: {reported}")

    def reach(self, place: Path) -> str:
        cache = place / "home" / "wdstrain" / "scans"
        written = list(cache.glob("*.arrow"))
        return "after" if written else "within" if cache.exists() else "before"


# --- cache ---


class Filling(Work):
    """An epoch over HTTP that fills a cache."""

    title = "cache filling"

    def __init__(self, shared: Path, url: str) -> None:
        super().__init__(shared)
        self.url = url
        self.shards = {path.read_bytes() for path in (shared / "served").glob("*.tar")}
        options: dict[str, Any] = {"batch_size": 16, "shuffle_buffer": 40}
        read = inside(lambda: epoch(wt.Loader(shared / "served", **options)))
        self.order = read.need("done").value

    @staticmethod
    def serve_from(shared: Path) -> Path:
        """Return the served folder."""
        bits = random.Random(0)
        rows = (
            {"__key__": f"k{n:03d}", "bin": bits.randbytes(1500 + n), "cls": n % 3}
            for n in range(160)
        )
        wt.pack(rows, str(shared / "served"), max_shard_samples=40)
        return shared / "served"

    def run(self, place: Path) -> None:
        os.environ |= {"WDSTRAIN_RANGE_SIZE": str(BLOCK), "WDSTRAIN_RETRY_PAUSE": "0.001"}
        with closing(
            wt.Loader(self.url, batch_size=16, shuffle_buffer=40, cache_dir=place / "cache")
        ) as loader:
            if epoch(loader) != self.order:
                raise WrongOutcome("other samples came")

    def look(self, place: Path) -> None:
        for path in (place / "cache").rglob("*.tar"):
            if path.read_bytes() not in self.shards:
                raise WrongOutcome(f"{path.name} in the cache is none of the shards")

    def end(self, place: Path) -> None:
        self.look(place)
        names = sorted(path.name for path in (place / "cache").rglob("*"))
        if len([name for name in names if name.endswith(".tar")]) != len(self.shards) or any(
            ".part" in name for name in names
        ):
            raise WrongOutcome(f"the cache holds {names}")

    def reach(self, place: Path) -> str:
        whole = len(list((place / "cache").rglob("*.tar"))) if (place / "cache").exists() else 0
        if whole == len(self.shards):
            return "after"
        return "within" if (place / "cache").exists() else "before"


# --- training ---


class Saving(Work):
    """Checkpoints of six steps, of which every second step is the best so far."""

    title = "checkpoint writing"
    steps = 6

    def run(self, place: Path) -> None:
        self.again(place)

    def lay(self, place: Path) -> None:
        (place / "c").mkdir(parents=True)

    def again(self, place: Path) -> None:
        (place / "c").mkdir(exist_ok=True)
        state, refused = checkpoint.read_last(str(place / "c"))
        if refused:
            raise WrongOutcome(f"checkpoints are not whole: {refused}")
        with disk_errors(str(place / "c")):  # as a resumed run begins
            for path in (place / "c").glob(".*.tmp"):
                path.unlink()
        for step in range(state["position"] + 1 if state else 1, self.steps + 1):
            is_best = step % 2 == 0
            write_checkpoint(str(place / "c"), self._state(step), step, keep=2, best=is_best)

    @staticmethod
    def _state(step: int) -> dict[str, Any]:
        weight, bias = torch.full((64, 64), float(step)), torch.full((64,), float(step))
        model = {"weight": weight, "bias": bias}
        return {"format": FORMAT, "model": model, "config": {}, "task": {}, "position": step}

    def look(self, place: Path) -> None:
        folder = place / "c"
        positions = {path.name: read_checkpoint(str(path)) for path in folder.glob("*.pt")}
        for name, state in positions.items():
            step = state["position"]
            if any((value != step).any() for value in state["model"].values()):
                raise WrongOutcome(f"{name} is mixed of several steps")
            if name.startswith("step-") and name != f"step-{step:08d}.pt":
                raise WrongOutcome(f"{name} is of step {step}")
        if BEST in positions and (
            positions[BEST]["position"] % 2 or (LAST not in positions and len(positions) < 2)
        ):
            raise WrongOutcome(f"best.pt is of step {positions[BEST]['position']}")
        if LAST in positions and positions[LAST]["position"] >= 2 and BEST not in positions:
            raise WrongOutcome("the best is behind last.pt and has no name")

    def end(self, place: Path) -> None:
        self.look(place)
        folder = str(place / "c")
        kept = {
            name: read_checkpoint(f"{folder}/{name}")["position"]
            for name in (LAST, BEST, *checkpoint.names(folder))
        }
        expected = {
            LAST: self.steps,
            BEST: self.steps,
            **{f"step-{step:08d}.pt": step for step in (self.steps - 1, self.steps)},
        }
        kept.pop(f"step-{self.steps - 2:08d}.pt", None)  # the next save would have taken it away
        if kept != expected or any(name.startswith(".") for name in os.listdir(folder)):
            raise WrongOutcome(f"left are {kept} and {sorted(os.listdir(folder))}")

    def reach(self, place: Path) -> str:
        names = os.listdir(place / "c") if (place / "c").exists() else []
        done = f"step-{self.steps:08d}.pt" in names and not any(
            name.endswith(".tmp") for name in names
        )
        return "after" if done else "within" if names else "before"


class Training(Work):
    """A run of two epochs with nine steps each, and checkpoints in between."""

    title = "training run"
    options: ClassVar[dict[str, Any]] = {
        "model": "small",
        "epochs": 2,
        "batch_size": 8,
        "image_size": 16,
        "optimizer": "sgd",
        "lr": 0.05,
        "deterministic": True,
        "checkpoint_every": 3,
    }

    def __init__(self, shared: Path) -> None:
        super().__init__(shared)
        pictures(shared / "in", 60)
        words = ["--split", "train=0.6,val=0.4", "--stratify", "label"]
        inside(
            lambda: typed("convert", "folder", str(shared / "in"), str(shared / "set"), *words)
        ).need("done")
        inside(lambda: self.run(shared / "undisturbed")).need("done")
        self._wanted = inside(lambda: self._came_to(shared / "undisturbed")).need("done").value

    def run(self, place: Path) -> None:
        train(str(self.shared / "set"), place / "run", **self.options)

    def again(self, place: Path) -> None:
        train(str(self.shared / "set"), place / "run", resume=True, **self.options)

    def look(self, place: Path) -> None:
        folder = place / "run" / "checkpoints"
        for name in os.listdir(folder) if folder.exists() else []:
            if name.endswith(".pt"):
                read_checkpoint(str(folder / name))

    def _came_to(self, place: Path) -> Any:
        state = {
            name: read_checkpoint(str(place / "run" / "checkpoints" / name))
            for name in (LAST, BEST)
        }
        weights = {
            f"{of}/{name}": value.numpy().tobytes()
            for of in state
            for name, value in state[of]["model"].items()
        }
        history = [
            {name: value for name, value in line.items() if not name.endswith(_TIMED)}
            for line in state[LAST]["state"]["history"]
        ]
        lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
        return weights, repr(history), len(lines)

    def end(self, place: Path) -> None:
        for description, actual, expected in zip(
            ("weights", "metrics", "lines"), self._came_to(place), self._wanted, strict=True
        ):
            if actual != expected:
                raise WrongOutcome(
                    f"it came to other {description}"
                    + f": {actual}, not {expected}" * (description != "weights")
                )
        left = [path.name for path in (place / "run").rglob("*.tmp")]
        if left:
            raise WrongOutcome(f"left behind: {left}")

    def reach(self, place: Path) -> str:
        if not (place / "run" / "config.toml").exists():
            return "before"
        is_over = (place / "run" / "report.html").exists() and self._is_over(place)
        return "after" if is_over else "within"

    def _is_over(self, place: Path) -> bool:
        lines = place / "run" / "metrics.jsonl"
        return lines.exists() and len(lines.read_text().splitlines()) == self.options["epochs"]


# --- helpers ---


def pictures(folder: Path, count: int) -> None:
    """Write images of two classes."""
    bits = np.random.default_rng(0)
    for number in range(count):
        path = folder / ("cat", "dog")[number % 2] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = bits.integers(0, 255, (16, 16, 3)) // 2 + 100 * (number % 2)
        buffer = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG")
        path.write_bytes(buffer.getvalue())


def foreign(folder: Path, shards: int = 3, samples: int = 40, salt: bytes = b"") -> None:
    """Write shards without an index: sample n has its number in its key, its class and its
    bytes.
    """
    from wdstrain.shards.tar_headers import END, header, padding

    folder.mkdir(parents=True)
    number = 0
    for shard in range(shards):
        with open(folder / f"part-{shard:03d}.tar", "wb") as file:
            for _ in range(samples):
                text = b"%06d" % number
                for name, data in (("bin", salt + text * 100), ("cls", b"%d" % (number % 7))):
                    file.write(header(f"s{text.decode()}.{name}", len(data)))
                    file.write(data + bytes(padding(len(data))))
                number += 1
            file.write(END)


def epoch(loader: wt.Loader, number: int = 0) -> list[tuple[str, bytes, bytes]]:
    """Return all samples of an epoch, in order."""
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


def true_of(index: Index) -> None:
    """Raise WrongOutcome unless an index equals a scan over its shards."""
    walked = scan(shard.path for shard in index.shards)
    if index.offsets.differences(walked.offsets):
        raise WrongOutcome("the index is not true of its shards")


def is_decided(out: Path) -> bool:
    """Return whether a conversion is replacing the set in a folder."""
    return (out / ".unfinished" / "commit.json").exists()


def visible(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by name, except hidden files."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".")
    }


def differing(actual: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    return sorted(
        name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)
    )
