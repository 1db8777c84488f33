"""`wt.bench`: measure a loader and its stages on the user's shards and settings.

Every rate is that of a real `wt.Loader`; only its input differs. Storage is measured with fields
that decode nothing, decoding on a local excerpt, the hand-off on the excerpt with fields that
decode nothing. With `tune`, other settings are run and their rates reported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace

from wdstrain.decode.fields import Field
from wdstrain.decode.fields import array as array_field
from wdstrain.decode.fields import image as image_field
from wdstrain.decode.formats import is_image
from wdstrain.decode.labels import field_of
from wdstrain.errors import UsageError
from wdstrain.loader.loader import Loader
from wdstrain.runtime.machine import cores
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_shards
from wdstrain.tuning import stages
from wdstrain.tuning.options import BenchOptions, LoaderChoices
from wdstrain.tuning.result import Bench, Trial
from wdstrain.tuning.run import Rate, Setup, Subject, settings

_EXCERPT = 256  # samples, and at least four batches
_STORAGE_LIMITS = 0.8  # of the hand-off rate: a higher storage rate is limited by the hand-off
_ONE_CORE = 1.2  # cores: threads that use less may wait for the GIL
_COMPUTES = 0.8  # share of its time in which a decoder that never waits is runnable
_SLOWED = 0.88  # of the rate without waiting for the GIL: threads that reach less are slowed by it


@takes(BenchOptions)
def bench(options: BenchOptions) -> Bench:
    """Return the rate of each stage of a loader and of the loader itself, and the bottleneck.

    Four or more measurements are made. Raises what `wt.Loader` raises, and UsageError for shards
    without samples.
    """
    index = open_shards(options.urls)
    if not len(index):
        raise UsageError("there are no samples in these shards. Check the address.")
    fields = options.fields
    if fields is None and options.transform is None and not options.as_bytes:
        fields = usual_fields(index, options.image_size, options.augment)
    chosen = {field.name: getattr(options, field.name) for field in fields_of(LoaderChoices)}
    batch_size = options.batch_size
    setup = Setup(fields, options.transform, options.num_workers, chosen, options.seconds)
    loader = Loader(  # checks options
        index, fields, options.transform, num_workers=options.num_workers, **chosen
    )
    index = loader.index  # its samples meet `where`
    setup = replace(setup, options={**chosen, "where": None})
    with tempfile.TemporaryDirectory() as folder:
        part = stages.excerpt(index, max(_EXCERPT, 4 * batch_size), os.path.join(folder, "a.tar"))
        on_part = {**setup.options, "batch_size": min(batch_size, len(part))}
        # The excerpt is a local file, and may be smaller than a global batch of all ranks.
        on_part |= {
            "cache_dir": None,
            "cache_limit": None,
            "rank": 0,
            "world_size": 1,
            "lanes": 1,
            "balance": None,
        }
        part_setup = replace(setup, options=on_part)
        changes = settings(index, part, setup, loader.shuffle_buffer) if options.tune else []
        progress = _Progress(options.note, 3 + 2 * setup.decodes + len(changes))
        result = _measure(index, part, setup, part_setup, progress, cold=options.cold)
        subject = Subject(index, part, setup, part_setup, folder)
        trials = list[Trial]()
        for name, value in changes:
            progress.step(f"{name}={value}")
            trials.append(subject.run(name, value))
    return replace(result, trials=tuple(trials))


def usual_fields(index: Index, size: int, augment: str) -> dict[str, Field] | None:
    """Return the fields that training would read: images or arrays, and the labels of the index.

    size: of images, in pixels. None if there are neither images nor arrays.
    """
    names = [name for name in index.fields if is_image(name)]
    plain = [name for name in names if "." not in name] or names
    labels = {label.field for label in index.labels}
    arrays = [
        name for name in index.fields if name.rpartition(".")[2] == "npy" and name not in labels
    ]
    if not plain and not arrays:
        return None
    fields: dict[str, Field] = {name: array_field(name) for name in arrays}
    if plain:
        fields = {"image": image_field(";".join(plain), size=size, augment=augment)}
    for label in index.labels:
        fields[f"label {label.name}"] = field_of(label)
    return fields


class _Progress:
    """Calls `note` before each measurement."""

    def __init__(self, note: Callable[[str, int, int], None] | None, total: int) -> None:
        self._note, self._total, self._number = note, total, 0

    def step(self, measurement: str) -> None:
        """Report the next measurement."""
        if self._note is not None:
            self._note(measurement, self._number, self._total)
        self._number += 1


def _measure(
    index: Index, part: Index, setup: Setup, part_setup: Setup, progress: _Progress, *, cold: bool
) -> Bench:
    """Return the rates of the stages and of the loader."""
    idle = setup.idle(part)
    if cold:
        stages.drop_page_cache(index)
    page_cache = stages.share_in_page_cache(index)
    progress.step("storage")
    storage = idle.run(index)
    progress.step("hand-off")
    handoff = on_part = replace(idle, options=part_setup.options).run(part)
    rates, process = {"storage": storage.rate}, None
    if setup.decodes:
        progress.step("decoding")
        on_part = part_setup.run(part)
        stage = "decode" if setup.transform is None else "transform"
        alone = int(on_part.report["decoders"]) / max(1e-9, on_part.decode)
        rates[stage] = max(alone, on_part.rate)  # a stage is at least as fast as the loader
        progress.step("the GIL")
        if setup.num_workers == 0 and _may_wait(on_part) and part_setup.fits_processes:
            process = part_setup.run(part, num_workers=1)
    rates["hand-off"] = handoff.rate
    if cold:
        stages.drop_page_cache(index)
    progress.step("the loader")
    whole = setup.run(index)
    bottleneck = _slowest(rates)
    if process is not None and bottleneck in ("decode", "transform"):
        free = _rate_without_gil(whole, process)
        if whole.rate < _SLOWED * free:
            rates[bottleneck], bottleneck = max(rates[bottleneck], free), "GIL"
    return Bench(
        samples=len(index),
        bytes=sum(shard.bytes for shard in index.shards),
        mean_bytes=float(index.offsets.size.sum()) / len(index),
        batch_size=int(setup.options["batch_size"]),
        num_workers=setup.num_workers,
        decoders=int(on_part.report["decoders"]),
        cores=cores(),
        stages=rates,
        bottleneck=bottleneck,
        achieved=whole.rate,
        first_batch=whole.first_batch,
        page_cache=page_cache,
        bad=whole.report["bad"],
    )


def _rate_without_gil(threads: Rate, process: Rate) -> float:
    """Return the rate that decoder threads would reach if none waited for the GIL, in samples/s.

    0 if they do not wait for it. A thread that waits for the GIL is not runnable, one that waits
    for a processor is, so the answer does not depend on what else the machine does. A worker
    process tells how much of its time the decoder waits for anything else.
    """
    share = process.runnable / max(1e-9, process.decode)
    if share < _COMPUTES or threads.runnable > _SLOWED * share * threads.decode:
        return 0.0
    return int(threads.report["decoders"]) * share / max(1e-9, threads.runnable)


def _may_wait(threads: Rate) -> bool:
    """Return whether decoder threads use so little of the processors that the GIL may be why."""
    return int(threads.report["decoders"]) > 1 and threads.rate * threads.compute < _ONE_CORE


def _slowest(rates: Mapping[str, float]) -> str:
    """Return the name of the slowest stage.

    Samples are handed off while storage is measured, so storage counts only if it is slower.
    """
    slowest = {
        name: rate
        for name, rate in rates.items()
        if name != "storage" or rate < _STORAGE_LIMITS * rates["hand-off"]
    }
    return min(slowest, key=lambda stage: slowest[stage])
