"""A source to a folder of shards and their index.

    listing ──────────────────────────────▶ catalog ──▶ plan ──▶ shards ──▶ index ──▶ in place
    stream ──▶ spill, in one pass ─────────▶   │  ▲
                    pictures made smaller ◀────┘  │  (only where that was asked for: sizes are planned as they will be)
                           └──────────────────────┘

The plan depends on the catalog and the options alone, so any number of jobs gives the same bytes. All is written on a stage
(`stage`); each shard carries the identity of what it was made from, so that `resume` writes only what is missing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from wdstrain.errors import SourceError, UsageError
from wdstrain.packing.bucket import check_free, deliver, outgoing
from wdstrain.packing.catalog import Catalog, ItemCatalog, SpanCatalog
from wdstrain.packing.collector import collector_paused
from wdstrain.packing.jobs import Tick, run
from wdstrain.packing.listing import Bad, Listing, Quarantine, Source, Stream
from wdstrain.packing.options import Options
from wdstrain.packing.pictures import Recipe
from wdstrain.packing.planning import Piece, batches, chosen, plan_shards
from wdstrain.packing.shard import Packed, identity, kept, write_shard
from wdstrain.packing.spill import spill, spilled
from wdstrain.packing.stage import BAD_NAME, RENAMED_NAME, Stage, made_of
from wdstrain.shards.index import Index, Label, join, with_labels
from wdstrain.shards.index_io import TABLE_NAME, check_sizes, json_bytes, load, save_index
from wdstrain.shards.offsets import ARRAYS
from wdstrain.storage.addresses import INDEX_NAME, SWAPPING
from wdstrain.storage.files import write_whole
from wdstrain.storage.object_store import is_object

_COMPARING = (
    ".comparing"  # in the folder of a finished set: the stage of the conversion it is compared with
)
_OF_FILES = ("classes", "data", "decided")  # what a source says of itself that its files decide
_PIECE = (
    6 << 20
)  # bytes of pictures that are made smaller at a time: work of a tenth of a second, so that jobs end together


class Step(NamedTuple):
    """How far a conversion is. total: None if nobody knows."""

    title: str
    done: int
    total: int | None
    bytes: int
    bad: int


Progress = Callable[[Step], None]


@dataclass(frozen=True)
class Conversion:
    """What a conversion did. samples: {split: {class: count}}; a source without classes has the class "".

    listed = packed + quarantined + left by `limit`.
    """

    index: Index
    listed: int
    bad: list[Bad]
    renamed: int
    samples: dict[str, dict[str, int]]
    ignored: dict[str, int] = field(default_factory=dict)
    kept: int = 0  # shards that an earlier run had written
    limited: int = 0  # samples that `limit` left out
    divided: int = 0  # pictures of several samples that came to different splits


def convert(
    source: Source, out: str, options: Options, progress: Progress | None = None
) -> Conversion:
    """Pack a source into the folder `out`, or into a bucket (s3://bucket/folder).

    Raises UsageError if `out` is in use, SourceError for a bad sample unless it is quarantined, StorageError for a disk
    that fails. What was written then stays on the stage for `resume`, and what was in `out` before is there still.
    """
    if is_object(out):
        return _into_bucket(source, out, options, progress)
    if source.root is not None and _lies_in(out, source.root):
        raise UsageError(
            f"{out} lies in {source.root}, which is being converted. Put the shards into another folder."
        )
    stage = Stage(out, overwrite=options.overwrite, resume=options.resume)
    if stage.whole:
        return _made(out, source, options, progress)
    try:
        _keep_call(stage, source, options)
    except BaseException:
        stage.leave()
        raise
    work = _Conversion(source, stage, options, progress)
    try:
        with collector_paused() if isinstance(source, Listing) else nullcontext():
            return work.run()
    except BaseException:
        work.stage.leave()
        raise


def _into_bucket(
    source: Source, address: str, options: Options, progress: Progress | None
) -> Conversion:
    """Make a set in the user's cache folder, and put it into a bucket."""
    folder = outgoing(address)
    if not (options.resume and os.path.exists(folder)):
        check_free(address, overwrite=options.overwrite)
    return _delivered(convert(source, folder, options, progress), folder, address, progress)


def _delivered(
    done: Conversion, folder: str, address: str, progress: Progress | None
) -> Conversion:
    """Put the set in a folder into a bucket, and take the folder away."""
    tell = progress or (lambda step: None)
    deliver(
        done.index,
        folder,
        address,
        lambda number, total, size: tell(Step("putting", number, total, size, len(done.bad))),
    )
    shutil.rmtree(folder)
    moved = tuple(
        replace(shard, path=f"{address.rstrip('/')}/{shard.name}") for shard in done.index.shards
    )
    return replace(done, index=replace(done.index, shards=moved))


class _Conversion:
    """compare: shards are made and not written, so that they can be compared with those that are there."""

    def __init__(
        self,
        source: Source,
        stage: Stage,
        options: Options,
        progress: Progress | None,
        *,
        compare: bool = False,
    ) -> None:
        self.source, self.stage, self._options, self._compare = source, stage, options, compare
        self._progress = progress or (lambda step: None)
        self._quarantine = Quarantine(collect=options.on_bad == "quarantine")
        self._kept = 0

    def run(self) -> Conversion:
        options, recipe = self._options, Recipe.of(self._options)
        catalog, labels, listed = self._catalog()
        first = catalog
        if not listed:
            passed = ", ".join(
                f"{count} x {reason}" for reason, count in self.source.ignored.items()
            )
            self.stage.clear()
            raise SourceError(
                f"{self.source.name} holds no samples{f' to be packed ({passed})' if passed else ''}."
            )
        numbers = chosen(catalog, options)
        limited = len(catalog.sizes) - len(numbers)
        if recipe.changes:
            catalog, recipe = self._encoded(catalog, recipe), recipe.looked_at()
            options = replace(options, limit=None)  # it was applied when the pictures were chosen
        resplit = isinstance(self.source, Stream) and self.source.resplit
        pieces = plan_shards(catalog, options, resplit=resplit)
        self.stage.check_names(list(dict.fromkeys(piece.split for piece in pieces)))
        shards = self.stage.folder("shards")
        title = "comparing" if self._compare else "packing"
        packed = list(self._packed(title, pieces, catalog, recipe, shards, write=not self._compare))
        written = sum(len(one.numbers) for one in packed)
        bad = self._quarantine.bad
        if listed != written + limited + len(bad):
            raise SourceError(
                f"{listed} samples were listed; {written} were packed, {len(bad)} quarantined, {limited} left out."
            )
        return self._placed(packed, catalog, first, labels, shards, listed, limited)

    # --- the parts of the road ---------------------------------------------------------------------------------------

    def _catalog(self) -> tuple[ItemCatalog | SpanCatalog, tuple[Label, ...], int]:
        """The samples, their labels, and how many the source holds, bad ones included."""
        source, options, quarantine = self.source, self._options, self._quarantine
        if isinstance(source, Listing):
            for bad in source.bad:
                quarantine.put(bad)
            catalog = ItemCatalog(source, options.seed, quarantine)
            return catalog, source.labels, len(source.items) + len(source.bad)
        folder = self.stage.folder("spill")
        found = spilled(source, folder, options, quarantine) if options.resume else None
        told = lambda done, size: self._tell("reading", done, source.total, size)  # noqa: E731
        return found or spill(source, folder, options, quarantine, told)

    def _encoded(self, catalog: Catalog, recipe: Recipe) -> SpanCatalog:
        """The same samples with their pictures made smaller, in files on the stage, in the order they will be packed."""
        numbers = chosen(catalog, self._options)
        runs = batches(numbers, catalog.sizes[numbers], _PIECE)
        pieces = [Piece(f"{place:06d}", "", run_) for place, run_ in enumerate(runs)]
        done = list(self._packed("encoding", pieces, catalog, recipe, self.stage.folder("encoded")))
        index = join([one.index for one in done])
        taken = np.concatenate([one.numbers for one in done])
        self._before = taken
        file = index.shard_of(np.arange(len(index))).astype(np.int32)
        paths = [shard.path for shard in index.shards]
        return SpanCatalog(
            self.source.name, paths, file, index.offsets, index.fields, catalog.marks.take(taken)
        )

    def _packed(
        self,
        title: str,
        pieces: list[Piece],
        catalog: Catalog,
        recipe: Recipe,
        folder: str,
        *,
        write: bool = True,
    ) -> Iterator[Packed]:
        """The shards as they are written, in order; those that an earlier run wrote are taken as they are."""
        options = self._options
        marks = [identity(piece, catalog, recipe, self._quarantine.collect) for piece in pieces]
        found = [
            kept(folder, piece, mark) if options.resume else None
            for piece, mark in zip(pieces, marks, strict=True)
        ]
        missing = [number for number, one in enumerate(found) if one is None]
        self._kept += len(pieces) - len(missing)
        total = sum(len(piece.numbers) for piece in pieces)
        before = sum(len(one.numbers) for one in found if one is not None)
        work = _Writing(
            folder,
            [pieces[number] for number in missing],
            [marks[number] for number in missing],
            catalog,
            recipe,
            self._quarantine.collect,
            max(1 << 20, options.memory // (8 * options.jobs)),
            write,
        )
        told = lambda done, size: self._tell(title, before + done, total, size)  # noqa: E731
        with closing(run(work, len(missing), options.jobs, told, engine=options.engine)) as results:
            for one in found:
                packed = next(results) if one is None else one
                for bad in packed.bad:
                    self._quarantine.put(bad)
                yield packed
            next(
                results, None
            )  # to its end, where its processes are waited for and may be interrupted

    def _placed(
        self,
        packed: list[Packed],
        catalog: ItemCatalog | SpanCatalog,
        first: ItemCatalog | SpanCatalog,
        labels: tuple[Label, ...],
        shards: str,
        listed: int,
        limited: int,
    ) -> Conversion:
        """Index, lists of what was renamed and quarantined, and the exchange. Shards that are empty are left away."""
        options, bad = self._options, self._quarantine.bad
        names: dict[str, str] = {}
        parts: list[Index] = []
        samples: dict[str, dict[str, int]] = {}
        renamed: list[dict[str, str]] = []
        numbers: dict[str, int] = {}
        alike = first.alike if isinstance(first, ItemCatalog) else {}
        sides: dict[str, set[str]] = {}  # of each picture that several samples have, the splits
        for one in packed:
            shard = one.index.shards[0]
            if not shard.samples:
                continue
            place = numbers[shard.split] = numbers.get(shard.split, -1) + 1
            final = f"{shard.split}-{place:06d}.tar"
            names[final] = shard.name
            parts.append(
                replace(one.index, shards=(replace(shard, path=os.path.join(shards, final)),))
            )
            counts = samples.setdefault(shard.split, {})
            for code, count in zip(
                *np.unique(catalog.marks.stratum[one.numbers], return_counts=True), strict=True
            ):
                name = catalog.marks.strata[code]
                counts[name] = counts.get(name, 0) + int(count)
            at = one.numbers if catalog is first else self._before[one.numbers]
            for n in at.tolist() if alike else ():
                if n in alike:
                    sides.setdefault(alike[n], set()).add(shard.split)
            renamed += [
                {"key": first.key(n), "name": first.names[n]}
                for n in (at.tolist() if first.names else ())
                if n in first.names
            ]
        if not parts:
            raise SourceError(
                f"none of {listed} samples could be packed; the first: {bad[0].sentence if bad else ''}"
            )
        order = {name: place for label in labels for place, name in enumerate(label.classes)}
        samples = {
            split: dict(
                sorted(counts.items(), key=lambda one: (order.get(one[0], len(order)), one[0]))
            )
            for split, counts in samples.items()
        }
        info = {
            "source": self.source.source,
            "options": _said(options),
            "samples": samples,
            "listed": listed,
            "quarantined": len(bad),
            "renamed": len(renamed),
            "ignored": self.source.ignored,
            "divided": (divided := sum(len(splits) > 1 for splits in sides.values())),
        }
        index = with_labels(join(parts), labels)
        index = replace(index, info=info)
        if self._compare:
            return Conversion(
                index, listed, bad, len(renamed), samples, self.source.ignored, self._kept, limited
            )
        save_index(index, shards)
        for name, rows in ((BAD_NAME, [one.portable() for one in bad]), (RENAMED_NAME, renamed)):
            if rows:
                write_whole(os.path.join(shards, name), b"".join(map(json_bytes, rows)))
                names[name] = name
        self.stage.put_in_place(shards, {**names, TABLE_NAME: TABLE_NAME, INDEX_NAME: INDEX_NAME})
        moved = tuple(
            replace(shard, path=os.path.join(self.stage.out, shard.name)) for shard in index.shards
        )
        index = replace(index, shards=moved)
        return Conversion(
            index,
            listed,
            bad,
            len(renamed),
            samples,
            self.source.ignored,
            self._kept,
            limited,
            divided,
        )

    def _tell(self, title: str, done: int, total: int | None, size: int) -> None:
        self._progress(Step(title, done, total, size, len(self._quarantine.bad)))


@dataclass(frozen=True)
class _Writing:
    """The work of writing shards, as processes are given it."""

    folder: str
    pieces: list[Piece]
    marks: list[str]
    catalog: Catalog
    recipe: Recipe
    collect: bool
    memory: int
    write: bool

    def __call__(self, number: int, tick: Tick) -> Packed:
        return write_shard(
            self.folder,
            self.pieces[number],
            self.catalog,
            self.recipe,
            collect=self.collect,
            memory=self.memory,
            mark=self.marks[number] if self.write else None,
            tick=tick,
        )


def _made(out: str, source: Source, options: Options, progress: Progress | None) -> Conversion:
    """The finished conversion in a folder, from what its index says of itself, if this call would make the same.

    The source is read, and its pictures are encoded, as if it was converted anew; what comes of it is compared and not written.
    Raises UsageError, naming what differs, if the source or an option is another, ShardError if a shard is gone or cut.
    """
    index = load(os.path.join(out, INDEX_NAME))
    check_sizes(index)
    other = _differences(index.info, _call(source, options))
    if not other:
        stage = Stage(os.path.join(out, _COMPARING), overwrite=True, resume=False)
        try:
            work = _Conversion(
                source, stage, replace(options, resume=False), progress, compare=True
            )
            other = _other(index, work.run().index)
        except SourceError as error:  # such as one that is empty now, or has a bad sample
            other = [str(error).rstrip(".")]
        finally:
            stage.clear()
            shutil.rmtree(stage.out, ignore_errors=True)  # also if one that was killed had made it
    if other:
        raise UsageError(
            f"{out} holds a finished conversion of another source or with other options: {'; '.join(other)}. Choose another "
            f"folder, or add --overwrite to replace it."
        )
    return _read_back(out, index)


def _read_back(out: str, index: Index) -> Conversion:
    """A finished conversion, from what its index says of itself."""
    info, bad = index.info, []
    with suppress(FileNotFoundError), open(os.path.join(out, BAD_NAME), "rb") as file:
        bad = [Bad(**{**row, "row": row["row"] or 0}) for row in map(json.loads, file)]
    limited = info["listed"] - len(index) - len(bad)
    return Conversion(
        index,
        info["listed"],
        bad,
        info["renamed"],
        info["samples"],
        info["ignored"],
        len(index.shards),
        limited,
        info.get("divided", 0),
    )


def resumed_in_place(
    out: str, stated: dict[str, Any], options: Options, progress: Progress | None = None
) -> Conversion | None:
    """The set of a conversion that replaces its own source, if that source is gone: nothing is left to convert.

    An exchange that was cut short, or a set that was being put into a bucket, is brought to its end. stated: what is known of
    the source without opening it (`tars.stated`). None: the source is to be opened.
    """
    if not options.resume or not stated["in_place"]:
        return None
    folder = outgoing(out) if is_object(out) else out
    if not os.path.exists(os.path.join(folder, SWAPPING)):
        place = os.path.join(folder, INDEX_NAME)
        if not os.path.exists(place) or made_of(place).get("in_place") != stated["in_place"]:
            return None
    stage = Stage(folder, overwrite=False, resume=True)
    if not stage.whole:
        stage.leave()
        return None
    index = load(os.path.join(folder, INDEX_NAME))
    check_sizes(index)
    source = index.info.get("source", {})
    former = {
        "source": {name: source.get(name) for name in stated},
        "options": index.info.get("options", {}),
    }
    other = _differences(
        former, json.loads(json.dumps({"source": stated, "options": _said(options)}))
    )
    if other:
        raise UsageError(
            f"{out} holds a finished conversion of another source or with other options: {'; '.join(other)}. It replaced its "
            f"source, so there is nothing to resume."
        )
    done = _read_back(folder, index)
    return _delivered(done, folder, out, progress) if is_object(out) else done


def _keep_call(stage: Stage, source: Source, options: Options) -> None:
    """Raise UsageError if the conversion that is resumed was asked for otherwise; write down what this one is asked for.

    Files of the source may have changed: the error that ended the conversion may have said to mend one. What is made of them is
    written anew. For the same reason on_bad may be another.
    """
    call = _call(source, options)
    former = stage.call()
    other = (
        _differences(
            former, {**call, "options": {**call["options"], "on_bad": former["options"]["on_bad"]}}
        )
        if former
        else []
    )
    if other:
        raise UsageError(
            f"{stage.out} holds an unfinished conversion of another source or with other options: {'; '.join(other)}. Resume it "
            f"as it was, choose another folder, or start anew with --overwrite."
        )
    stage.keep_call(call)


def _call(source: Source, options: Options) -> dict[str, Any]:
    """What a conversion is asked for, as JSON has it: the source as far as its files do not decide, and the options."""
    stated = {name: value for name, value in source.source.items() if name not in _OF_FILES}
    call: dict[str, Any] = json.loads(json.dumps({"source": stated, "options": _said(options)}))
    return call


def _differences(former: dict[str, Any], call: dict[str, Any]) -> list[str]:
    """Each entry of a call that is another than in the former: "seed was 0, is 3"."""
    found = []
    for part, values in call.items():
        before = {
            name: value for name, value in former.get(part, {}).items() if name not in _OF_FILES
        }
        for name in dict.fromkeys([*before, *values]):
            if before.get(name) != values.get(name):
                found.append(f"{name} was {before.get(name)!r}, is {values.get(name)!r}")
    return found


def _other(former: Index, index: Index) -> list[str]:
    """The first thing in which two sets differ."""
    for was, now in zip_longest(former.labels, index.labels):
        if was != now:
            return [f"the label was {_shown(was)}, is {_shown(now)}"]
    if not len(former.offsets.member_crc):
        return ["its index has no checksums to compare with"]
    ours, theirs = (_contents(one) for one in (former, index))
    gone, new = (
        [key for key in ours if key not in theirs],
        [key for key in theirs if key not in ours],
    )
    for what, keys in (
        ("the sample '{}' is not in the source, or not in this split", gone),
        ("the sample '{}' is new", new),
    ):
        if keys:
            return [
                what.format(keys[0][1]) + (f", and {len(keys) - 1} more" if len(keys) > 1 else "")
            ]
    changed = [key for key, members in ours.items() if members != theirs[key]]
    if changed:
        return [
            f"the sample '{changed[0][1]}' is another"
            + (f", and {len(changed) - 1} more" if len(changed) > 1 else "")
        ]
    names = ("listed", "quarantined", "renamed", "samples", "ignored")
    found = _differences(
        {"": {n: former.info.get(n) for n in names}},
        {"": json.loads(json.dumps({n: index.info[n] for n in names}))},
    )
    shards = [
        [(shard.name, shard.samples, shard.bytes) for shard in one.shards]
        for one in (former, index)
    ]
    same = shards[0] == shards[1] and all(
        np.array_equal(getattr(former.offsets, n), getattr(index.offsets, n)) for n in ARRAYS
    )
    if found or not same:
        return found or ["the samples lie in another order"]
    # two PNGs of one size can have one crc32
    pairs = zip(former.shards, index.shards, strict=True)
    other = [was.name for was, now in pairs if was.sha256 and was.sha256 != now.sha256]
    return [f"the bytes of {other[0]} are others (sha256)"] if other else []


def _contents(index: Index) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    """(split, key) -> (field, size, crc32) of each member."""
    splits = np.repeat(np.arange(len(index.shards)), index.counts).tolist()
    keys, crc, first = (
        index.keys(np.arange(len(index))),
        index.offsets.member_crc.tolist(),
        index.offsets.member_first.tolist(),
    )
    return {
        (index.shards[splits[n]].split, key): [
            (field, size, crc[first[n] + m]) for m, (field, _, size) in enumerate(index.members(n))
        ]
        for n, key in enumerate(keys)
    }


def _shown(label: Label | None) -> str:
    if label is None:
        return "none"
    names = ", ".join(label.classes[:8]) + (", ..." if len(label.classes) > 8 else "")
    return f"{label.name} ({label.kind}{f' of {len(label.classes)}: {names}' if label.classes else ''})"


def _said(options: Options) -> dict[str, Any]:
    """The options that the bytes depend on, as the index keeps them."""
    names = (
        "seed",
        "shuffle",
        "split",
        "stratify",
        "resize",
        "quality",
        "check",
        "limit",
        "shard_samples",
        "shard_bytes",
        "on_bad",
    )
    return {name: getattr(options, name) for name in names}


def _lies_in(path: str, folder: str) -> bool:
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return real == root or real.startswith(os.path.join(root, ""))
