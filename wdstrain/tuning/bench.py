"""`wt.bench`: the rate of each stage of a loader, of the loader itself, and the bottleneck.

Every rate is that of a real `wt.Loader`; only its input differs. Storage is measured with fields
that decode nothing, decoding on a local excerpt, and the hand-off on the excerpt with fields that
decode nothing. With `tune`, other numbers of worker processes are run too.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any, NamedTuple

import numpy as np

from wdstrain.conversion.shard_writer import write_samples
from wdstrain.decode.decoder import Transform
from wdstrain.decode.fields import Example, Field, read_field
from wdstrain.decode.fields import array as array_field
from wdstrain.decode.fields import image as image_field
from wdstrain.decode.formats import is_image
from wdstrain.decode.labels import field_of
from wdstrain.decode.transforms import Draws
from wdstrain.decode.worker_processes import check_picklable
from wdstrain.errors import SampleError, UsageError
from wdstrain.loader.loader import Loader
from wdstrain.loader.options import takes_rng
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_shards
from wdstrain.shards.values import Array
from wdstrain.storage.remote import is_remote
from wdstrain.tuning.options import BenchOptions, LoaderChoices
from wdstrain.tuning.result import Bench, Trial

_EXCERPT, _EXCERPT_BYTES = 256, 64 << 20  # samples, at least; bytes, at most
_RUNS = 4  # places of the set from which the samples of an excerpt are taken
_LIMITS = 0.8  # of the hand-off rate: a stage that is faster is limited by the hand-off

Note = Callable[[str], object]  # called with the name of the next measurement


@takes(BenchOptions)
def bench(options: BenchOptions) -> Bench:
    """Return the rate of each stage of a loader and of the loader itself, and the bottleneck.

    Three or more measurements are made. Raises what `wt.Loader` raises, and UsageError for shards
    without samples.
    """
    index = open_shards(options.urls)
    if not len(index):
        raise UsageError("there are no samples in these shards. Check the address.")
    fields = options.fields
    if fields is None and options.transform is None and not options.as_bytes:
        fields = usual_fields(index, options.image_size, options.augment)
    chosen = {field.name: getattr(options, field.name) for field in fields_of(LoaderChoices)}
    loader = Loader(index, fields, options.transform, **chosen)  # checks options
    chosen |= {"where": None, "max_errors": 1.0}  # the samples of the loader's index meet `where`
    whole = _Subject(loader.index, fields, options.transform, chosen, options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        part = whole.on_excerpt(max(_EXCERPT, 4 * options.batch_size), f"{folder}/part.tar")
        counts = _counts_to_try(whole) if options.tune else []
        most, done = 3 + whole.decodes + len(counts), list[str]()

        def note(measurement: str) -> None:
            if options.note is not None:
                options.note(measurement, len(done), most)
            done.append(measurement)

        result = _measure(whole, part, note, cold=options.cold)
        trials = []
        for count in counts:
            note(f"num_workers={count}")
            # The load of a machine changes from minute to minute, so both are measured together.
            baseline, rate = whole.run().rate, whole.run(num_workers=count).rate
            trials.append(Trial(f"num_workers={count}", rate, baseline, f"--num-workers {count}"))
    return replace(result, trials=tuple(trials))


def usual_fields(index: Index, size: int, augment: str) -> dict[str, Field] | None:
    """Return the fields that training would read: images or arrays, and the labels of the index.

    size: of images, in pixels. None if there are neither images nor arrays.
    """
    names = [name for name in index.fields if is_image(name)]
    plain = [name for name in names if "." not in name] or names
    labels = {label.field for label in index.labels}
    arrays = [n for n in index.fields if n.rpartition(".")[2] == "npy" and n not in labels]
    if not plain and not arrays:
        return None
    fields: dict[str, Field] = {name: array_field(name) for name in arrays}
    if plain:
        fields = {"image": image_field(";".join(plain), size=size, augment=augment)}
    return fields | {f"label {label.name}": field_of(label) for label in index.labels}


# --- measurements ---------------------------------------------------------------------------------


class _Rate(NamedTuple):
    """Result of a run: samples/s, seconds until the first batch, report of the last epoch."""

    rate: float
    first_batch: float
    report: Mapping[str, Any]


@dataclass(frozen=True)
class _Subject:
    """A loader that is measured. options: other arguments of it. seconds: of a measurement."""

    index: Index
    fields: Mapping[str, Field] | None
    transform: Transform | None
    options: Mapping[str, Any]
    seconds: float

    @property
    def decodes(self) -> bool:
        """Whether samples are decoded at all. Without fields and transform they are bytes."""
        return self.fields is not None or self.transform is not None

    def run(self, **changes: Any) -> _Rate:
        """Run the loader for `seconds` after its first batch. changes: other options."""
        begin = time.perf_counter()
        first, rows, batches = begin, 0, 0
        with Loader(
            self.index, self.fields, self.transform, **{**self.options, **changes}
        ) as loader:
            while batches < 2 or time.perf_counter() - first < self.seconds:
                for batch in loader:
                    now = time.perf_counter()
                    first = first if batches else now
                    rows += len(batch["__key__"]) if batches else 0
                    batches += 1
                    del batch
                    if now - first >= self.seconds and batches > 1:
                        break
            rate = rows / (time.perf_counter() - first)
            return _Rate(rate, first - begin, loader.report())

    def idle(self) -> _Subject:
        """Return the same loader with fields or a transform that decode nothing."""
        if self.transform is not None:
            transform, index = self.transform, self.index
            rng = (np.random.Generator(np.random.Philox(0)),) if takes_rng(transform) else ()

            def decode(number: int, fields: Mapping[str, bytes]) -> Any:
                return transform({"__key__": index.key(number), **fields}, *rng)

            return replace(self, transform=_Idle(_first(decode, index, None)))
        fields = {name: _idle_field(f, self.index) for name, f in (self.fields or {}).items()}
        return replace(self, fields=fields if self.decodes else None)

    def on_excerpt(self, count: int, path: str) -> _Subject:
        """Return the loader over a new tar at `path` with samples from all over the set.

        It does not wait for storage: it has about `count` samples, at most about 64 MB.
        """
        index = self.index
        total = max(1, sum(shard.bytes for shard in index.shards))
        count = max(1, min(count, len(index), int(_EXCERPT_BYTES * len(index) / total)))
        starts = np.linspace(0, max(0, len(index) - count // _RUNS), _RUNS).astype(np.int64)
        ids = np.unique(np.add.outer(starts, np.arange(-(-count // _RUNS))).clip(0, len(index) - 1))
        # Samples of several shards may share a key, so the id becomes the key.
        samples = ((f"{number:012d}", list(f.items())) for number, f in index.read(ids))
        made = write_samples(path, "", samples, lambda *_: None)
        part = replace(made.with_columns(index.take(ids).columns), labels=index.labels)
        # A local file, which may be smaller than a global batch of all ranks.
        own = {"cache_dir": None, "cache_limit": None, "balance": None, "rank": 0, "world_size": 1}
        batch_size = min(self.options["batch_size"], len(part))
        return replace(self, index=part, options={**self.options, **own, "batch_size": batch_size})


def _measure(whole: _Subject, part: _Subject, note: Note, *, cold: bool) -> Bench:
    """Return the rates of the stages and of the loader. part: the loader over an excerpt."""
    index, idle = whole.index, part.idle()
    if cold:
        _drop_page_cache(index)
    page_cache = _share_in_page_cache(index)
    note("storage")
    fields, transform = idle.fields, idle.transform
    storage = replace(whole, fields=fields, transform=transform).run()
    note("hand-off")
    handoff = idle.run()
    rates = {"storage": storage.rate, "hand-off": handoff.rate}
    stage = "decode" if whole.transform is None else "transform"
    if whole.decodes:
        note("decoding")
        decoding = part.run()
        rates = {"storage": storage.rate, stage: decoding.rate, "hand-off": handoff.rate}
    slow = {name: rate for name, rate in rates.items() if rate < _LIMITS * handoff.rate}
    bottleneck = min(slow, key=lambda name: slow[name]) if slow else "hand-off"
    if cold:
        _drop_page_cache(index)
    note("the loader")
    loader = whole.run()
    return Bench(
        samples=len(index),
        bytes=sum(shard.bytes for shard in index.shards),
        mean_bytes=float(index.offsets.size.sum()) / len(index),
        batch_size=int(whole.options["batch_size"]),
        num_workers=whole.options["num_workers"],
        decoders=int(loader.report["decoders"]),
        cores=cores(),
        stages=rates,
        bottleneck=bottleneck,
        achieved=loader.rate,
        first_batch=loader.first_batch,
        page_cache=page_cache,
        bad=loader.report["bad"],
    )


# --- other settings -------------------------------------------------------------------------------


def _counts_to_try(whole: _Subject) -> list[int]:
    """Return numbers of workers without that in use; none if fields or functions cannot be sent."""
    functions = {"transform": whole.transform, "collate_fn": whole.options["collate_fn"]}
    try:
        check_picklable(whole.fields, functions, whole.options["multiprocessing_context"])
    except UsageError:
        return []
    powers = [2**power for power in range(cores().bit_length()) if 2**power <= cores()]
    counts = {0, cores(), *powers} - {whole.options["num_workers"]}
    return sorted(counts) if whole.decodes else []


# --- the page cache -------------------------------------------------------------------------------


def _share_in_page_cache(index: Index) -> float | None:
    """Return the share of the shards in the page cache, 0 to 1, sampled at 64 offsets.

    None for remote shards, and where the file system cannot report it.
    """
    hits, rows = 0, np.linspace(0, len(index) - 1, 64).astype(np.int64)
    for number, shard in zip(rows.tolist(), index.shard_of(rows).tolist(), strict=True):
        if is_remote(index.shards[shard].path):
            return None
        with open(index.shards[shard].path, "rb") as file:
            offset = int(index.offsets.start[number])
            try:
                hits += os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
            except BlockingIOError:  # not in the page cache
                continue
            except OSError:
                return None
    return hits / len(rows)


def _drop_page_cache(index: Index) -> None:
    """Ask the system to drop local shards from the page cache, so that they are read from disk."""
    for shard in index.shards:
        if not is_remote(shard.path):
            with open(shard.path, "rb") as file, suppress(OSError):
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- inputs that decode nothing -------------------------------------------------------------------


@dataclass(frozen=True)
class _Idle:
    """Field or transform that decodes nothing, and gives the same value for every sample.

    Batch memory stays unchanged.
    """

    value: Any
    names: tuple[str, ...] = ()
    example: Example | None = None

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
        return self.value

    def __call__(self, sample: dict[str, Any]) -> Any:
        return self.value


def _idle_field(field: Field, index: Index) -> _Idle:
    """Return an idle field with the output of `field` for a sample of a local index."""

    def decode(_: int, fields: Mapping[str, bytes]) -> Any:
        name, data = next(iter(fields.items()))
        return read_field(field, name, memoryview(bytearray(data)), None, np.full(64, 0.5))

    value = _first(decode, index, field.names) if field.example is None else None
    return _Idle(value, tuple(field.names), field.example)


def _first(decode: Callable[[int, Any], Any], index: Index, names: Sequence[str] | None) -> Any:
    """Return the first output of a user's function. Raises SampleError if it fails for all."""
    reason = ""
    for number, fields in index.read(range(len(index)), names):
        try:
            return decode(number, fields)
        except Exception as error:  # the user's code may raise anything
            reason = f"{type(error).__name__}: {error}"
    raise SampleError(f"decoding failed for all of {len(index)} samples ({reason}).")
