"""What holds loading back on this machine: its limits are measured, and the loader; what would help is predicted, and tried.

The numbers that `measured` reasons with come from this data on this machine (`limits`), and what it says for a setting can be compared
with what that setting then gives (`tune`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from wdstrain.decode.codecs import decode_image
from wdstrain.decode.fields import Field, Image
from wdstrain.decode.fields import array as array_field
from wdstrain.decode.fields import image as image_field
from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.decode.label_fields import field_of
from wdstrain.decode.pickling import check_picklable
from wdstrain.decode.settings import Transform
from wdstrain.errors import SampleError, UsageError
from wdstrain.loader.loader import Loader, open_shards, takes_rng
from wdstrain.packing.options import Options
from wdstrain.packing.pictures import Recipe
from wdstrain.runtime.machine import cores
from wdstrain.shards.index import Index
from wdstrain.storage.addresses import Urls
from wdstrain.storage.remote import is_remote
from wdstrain.tuning import stages
from wdstrain.tuning.result import UNEVEN, Bench, Change, Try

_SAMPLES = 256  # of an excerpt, and four batches at least
_WORTH = 1.1  # times as fast: less is not worth a change
_LARGER = 1.25  # times a side: less makes too little of a difference to pack anew for it
_MARGIN = 8 / 7  # a picture that is cropped may be this much larger than the crop, as 256 for 224

Say = Callable[[str, int, int], None]  # what is measured, its number, and how many there are


def bench(
    urls: Urls | Index,
    fields: Mapping[str, Field] | None = None,
    transform: Transform | None = None,
    *,
    batch_size: int = 64,
    num_workers: int = 0,
    seconds: float = 1.5,
    tune: bool = False,
    cold: bool = False,
    note: Say | None = None,
    **options: Any,
) -> Bench:
    """Measure what each stage of a loader could do on this data and machine, what the loader does, and what would help.

    seconds: of each measurement, of which there are seven or eight. tune: also run the loader with other numbers of workers. cold: local shards are first
    put out of the system's memory, as far as it lets them go, so that they come from the disk. note: is told what is
    measured, the how many-th of how many that is. options: those of `Loader`. Raises what `Loader` raises with worker processes, which
    are measured too.
    """
    if seconds <= 0:
        raise UsageError(f"seconds={seconds}: each measurement takes some. Give for example 1.5.")
    index = urls if isinstance(urls, Index) else open_shards(urls)
    if not len(index):
        raise UsageError("there are no samples in these shards. Check the address.")
    told = 0

    def tell(what: str) -> None:
        nonlocal told
        if note is not None:
            note(
                what,
                told,
                (4 if fields is None and transform is None else 7 + tune * len(_settings())),
            )
        told += 1

    options = {"on_bad": "replace", "max_bad": 1.0, **options}
    Loader(
        index, fields, transform, batch_size=batch_size, num_workers=num_workers, **options
    )  # what cannot be is told at once
    functions = {"transform": transform, "collate_fn": options.get("collate_fn")}
    check_picklable(
        fields, functions, options.get("multiprocessing_context"), instead=""
    )  # processes are measured in any case
    mean = float((index.table.stop - index.table.start).sum()) / len(
        index
    )  # what is read of a sample, its headers included
    with tempfile.TemporaryDirectory() as folder:
        few = stages.excerpt(index, max(_SAMPLES, 4 * batch_size), os.path.join(folder, "part.tar"))
        if cold:
            stages.forget(index)
        cached = stages.in_memory(index)
        tell("storage")
        storage = stages.storage_rate(index, batch_size, seconds) / mean
        made = _Parts(few, fields, transform, batch_size, seconds, options)
        decode: dict[str, dict[int, float]] = {}
        handoff: dict[str, float] = {}
        for kind in ("threads",) if made.inline else ("threads", "processes"):
            tell(f"decoding in {kind}")
            decode[kind] = made.decoding(few, kind)
            if not made.inline:
                tell(f"hand-off from {kind}")
                handoff[kind] = made.handing_over(kind)
        decode.setdefault("processes", decode["threads"])
        if cold:
            stages.forget(index)
        tell("the loader")
        rate, first, loader = _run(
            index, fields, transform, num_workers, batch_size, seconds, options
        )
        found = Bench(
            samples=len(index),
            bytes=sum(shard.bytes for shard in index.shards),
            mean_bytes=mean,
            batch_size=batch_size,
            num_workers=num_workers,
            cores=cores(),
            storage=storage,
            in_memory=cached,
            decode=decode,
            handoff=handoff,
            achieved=rate,
            first_batch=first,
            bad=loader.report()["bad"],
            report_verdict=loader.report()["verdict"],
            inline=made.inline,
        )
        tell("smaller pictures")
        found = replace(found, changes=tuple(_changes(found, index, few, made, fields, folder)))
    tries = []
    for count in _settings() if tune and not made.inline else ():
        tell(f"num_workers={count}")
        rate = found.achieved
        if count != num_workers:
            rate, _, _ = _run(index, fields, transform, count, batch_size, seconds, options)
        tries.append(Try(count, found.predicted(count), rate))
    return replace(found, tries=tuple(tries))


def usual_fields(index: Index, size: int, augment: str) -> dict[str, Field] | None:
    """The fields that training would read: pictures of this size, else arrays, and the labels that the index names; None if there are neither."""
    names = [name for name in index.fields if name.rpartition(".")[2] in EXTENSIONS]
    plain = [name for name in names if "." not in name] or names
    labels = {label.field for label in index.labels}
    arrays = [
        name for name in index.fields if name.rpartition(".")[2] == "npy" and name not in labels
    ]
    if not plain and not arrays:
        return None
    found: dict[str, Field] = {name: array_field(name) for name in arrays}
    if plain:
        found = {"image": image_field(";".join(plain), size=size, augment=augment)}
    for label in index.labels:
        found[f"label {label.name}"] = field_of(label)
    return found


# --- parts -----------------------------------------------------------------------------------------------------------


class _Parts:
    """The stages of one loader, each measured by itself on an excerpt."""

    def __init__(
        self,
        few: Index,
        fields: Mapping[str, Field] | None,
        transform: Transform | None,
        batch_size: int,
        seconds: float,
        options: dict[str, Any],
    ) -> None:
        self._few, self._fields, self._transform = few, fields, transform
        self._batch, self._seconds, self._options = min(batch_size, len(few)), seconds, options
        self.inline = fields is None and transform is None

    def decoding(self, few: Index, kind: str) -> dict[int, float]:
        """Samples a second of one decoder, and of one on each processor."""
        rng = self._transform is not None and takes_rng(self._transform)
        bare = stages.Bare(
            few, self._fields, self._transform, self._batch, rng, self._options.get("collate_fn")
        )
        context = self._options.get("multiprocessing_context")
        found = {}
        for count in sorted({1, cores()}):
            # a limit is what was reached at best: twice, since other programs take processors as they like
            found[count] = max(
                bare.threads(count, self._seconds / 2)
                if kind == "threads"
                else bare.processes(count, self._seconds / 2, context)
                for _ in range(2)
            )
        return found

    def loading(self, few: Index, num_workers: int) -> float:
        """Samples a second of a loader over an excerpt: all but the storage."""
        return _run(
            few,
            self._fields,
            self._transform,
            num_workers,
            self._batch,
            self._seconds,
            self._options,
        )[0]

    def handing_over(self, kind: str) -> float:
        """Samples a second where nothing is decoded."""
        fields: dict[str, Field] | None = None
        transform: Transform | None = None
        if self._transform is not None:
            rng = (np.random.Generator(np.random.Philox(0)),) if takes_rng(self._transform) else ()
            transform = stages.Same(_example(self._few, self._transform, rng))
        else:
            fields = {
                name: stages.Idle.like(one, self._few) for name, one in (self._fields or {}).items()
            }
        workers = 0 if kind == "threads" else cores()
        return _run(
            self._few, fields, transform, workers, self._batch, self._seconds, self._options
        )[0]


def _run(
    index: Index,
    fields: Mapping[str, Field] | None,
    transform: Transform | None,
    num_workers: int,
    batch_size: int,
    seconds: float,
    options: dict[str, Any],
) -> tuple[float, float, Loader]:
    """(samples a second, seconds to the first batch, the loader) of a loader whose batches nobody works on."""
    loader = Loader(
        index, fields, transform, batch_size=batch_size, num_workers=num_workers, **options
    )
    begun = first = time.perf_counter()
    rows, batches = 0, 0
    try:
        while True:
            for batch in loader:
                now = time.perf_counter()
                if not batches:
                    first = now
                rows += len(batch["__key__"]) if batches else 0
                batches += 1
                del batch
                if now - first >= seconds and batches > 1:
                    return rows / (now - first), first - begun, loader
    finally:
        loader.close()


def _settings() -> list[int]:
    """Numbers of workers that are tried: 0, and powers of two up to the processors there are."""
    return sorted(
        {0, cores(), *(2**power for power in range(cores().bit_length()) if 2**power <= cores())}
    )


def _example(few: Index, transform: Transform, rng: tuple[Any, ...]) -> Mapping[str, Any]:
    with open(few.shards[0].path, "rb") as file:
        reason = "there is no sample"
        for number in range(len(few)):
            sample: dict[str, Any] = {"__key__": few.key(number)}
            for name, offset, size in few.members(number):
                file.seek(offset)
                sample[name] = file.read(size)
            try:
                made: Mapping[str, Any] = transform(sample, *rng)
                return made
            except Exception as error:  # of the user's own code; the next sample may be better
                reason = f"{type(error).__name__}: {error}"
    raise SampleError(f"the transform gave nothing for any of {len(few)} samples ({reason}).")


def _changes(
    found: Bench,
    index: Index,
    few: Index,
    made: _Parts,
    fields: Mapping[str, Field] | None,
    folder: str,
) -> list[Change]:
    """What would give at least a tenth more than the loader does now, by what was measured."""
    options: list[Change] = []
    if not found.inline:
        others = {
            count: found.predicted(count) for count in _settings() if count != found.num_workers
        }
        best = max(others, key=lambda count: others[count])
        options.append(Change(f"num_workers={best}", others[best]))
    if any(is_remote(shard.path) for shard in index.shards):
        options.append(
            Change(
                "a cache (cache_dir), from the second epoch on,",
                replace(found, storage=1e12).predicted(found.num_workers),
            )
        )
    smaller = _smaller(few, fields)
    if smaller is not None and found.binding in ("decode", "processors", "lock", "storage"):
        small = stages.excerpt(
            few,
            len(few),
            os.path.join(folder, "small.tar"),
            Recipe.of(Options(resize=smaller)).apply,
        )
        share = small.shards[0].bytes / few.shards[0].bytes
        rate = min(found.storage / max(1e-9, share), made.loading(small, found.num_workers))
        options.append(Change(f"packing anew with --resize {smaller}", rate))
    even = found.achieved <= UNEVEN * found.predicted(found.num_workers)
    return [one for one in options if even and one.rate >= _WORTH * found.achieved]


def _smaller(few: Index, fields: Mapping[str, Field] | None) -> int | None:
    """The size to which pictures could be made smaller for what is taken of them; None if most are not larger than that."""
    pictures = [one for one in (fields or {}).values() if isinstance(one, Image)]
    if len(pictures) != 1 or pictures[0].size is None:
        return None
    wanted, sides = round(max(pictures[0].size) * _MARGIN), []
    with open(few.shards[0].path, "rb") as file:
        for number in range(min(32, len(few))):
            for name, offset, size in few.members(number):
                if name in pictures[0].names:
                    file.seek(offset)
                    try:
                        sides.append(min(decode_image(file.read(size)).shape[:2]))
                    except SampleError:
                        continue
    return wanted if sides and float(np.median(sides)) >= wanted * _LARGER else None
