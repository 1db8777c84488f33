"""The verbs that make shards: `wdstrain convert KIND ...`, one kind for each sort of source."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from wdstrain.cli.words import (
    Verb,
    facts,
    label_options,
    result,
    shares,
    size,
    summary,
    verb,
    where,
)
from wdstrain.packing.convert import Conversion, Step, convert, resumed_in_place
from wdstrain.packing.listing import Source
from wdstrain.packing.options import Options
from wdstrain.report.terminal import ProgressReporter, print_message
from wdstrain.runtime.machine import cores

_AGAIN = "The same command with --resume goes on with what is finished so far. What was in the folder before is there still."
_MOST_CLASSES = 20  # rows of classes in the summary


def add_convert(verbs: Any) -> None:
    """Add the verb and its kinds."""
    parser = verbs.add_parser("convert", help="make shards", description="Make shards.")
    kinds = parser.add_subparsers(title="kinds of source", metavar="KIND", required=True)

    folder = _kind(
        kinds,
        "folder",
        _folder,
        "class folders",
        "folder photos/ shards/photos --split train=0.9,val=0.1",
    )
    folder.add_argument(
        "source",
        help="folder with a folder for each class, or with train/ and val/ of such folders",
    )
    folder.add_argument("out", help="folder for the shards")
    folder.add_argument("--flat", action="store_true", help="pictures without classes")

    rows = _kind(
        kinds,
        "table",
        _table,
        "a table (CSV, TSV, JSON lines, parquet)",
        "table log.csv shards/log --image path --label angle",
    )
    rows.add_argument("file", help="table; by its extension: .csv, .tsv, .jsonl, .parquet")
    rows.add_argument("out", help="folder for the shards")
    rows.add_argument(
        "--image",
        required=True,
        metavar="COL",
        help="column of picture paths, or of their bytes (parquet)",
    )
    rows.add_argument(
        "--label",
        metavar="COL[,COL...]",
        help="columns to learn; COL:class, COL:number, COL:multi (a|b) say which kind",
    )
    rows.add_argument(
        "--root",
        metavar="DIR",
        help="where relative paths begin (default: the table's folder), and absolute ones of another machine are looked for",
    )
    rows.add_argument(
        "--no-header",
        dest="header",
        action="store_false",
        help="CSV without a header: columns are 0, 1, ...",
    )
    rows.add_argument(
        "--group-by", metavar="COL", help="rows that are equal in it come to one side of a split"
    )
    rows.add_argument("--split-by", metavar="COL", help="column that names each row's split")

    hdf5 = _kind(
        kinds,
        "hdf5",
        _hdf5,
        "an HDF5 or PyTables file",
        "hdf5 data.h5 shards/data --field image=/images --field cls=/labels",
    )
    hdf5.add_argument("file", help="HDF5 file")
    hdf5.add_argument("out", help="folder for the shards")
    hdf5.add_argument(
        "--key",
        metavar="/PATH",
        help="data set that names the samples (default: they are numbered)",
    )

    arrays = _kind(
        kinds,
        "arrays",
        _arrays,
        ".npy and .npz arrays",
        "arrays shards/data --field png=images.npy --field cls=labels.npy",
    )
    arrays.add_argument("out", help="folder for the shards")
    for one, what in ((hdf5, "/path/in/file"), (arrays, "FILE.npy or FILE.npz:member")):
        one.add_argument(
            "--field",
            action="append",
            default=[],
            type=_pair,
            metavar="NAME=" + what.split(" ")[0],
            help=f"field and its {what}; png=, jpg= store rows as pictures, cls= as classes, other names as NAME.npy",
        )
        one.add_argument(
            "--label",
            metavar="NAME[,NAME...]",
            help="fields to learn; NAME:class or NAME:number says which kind",
        )
        one.add_argument(
            "--classes", metavar="A,B,...", help="names of the classes that cls counts"
        )

    tars = _kind(
        kinds,
        "tars",
        _tars,
        "existing shards, anew",
        "tars 'old/*.tar' shards/new --select 'cls < 3' --split train=.9,val=.1",
    )
    tars.add_argument(
        "urls",
        nargs="+",
        metavar="URL",
        help="folder, index.json, tar, glob or brace pattern of shards",
    )
    tars.add_argument("out", help="folder for the new shards")
    tars.add_argument("--keep", metavar="F[,F...]", help="fields that stay")
    tars.add_argument("--drop", metavar="F[,F...]", help="fields that go")
    tars.add_argument("--rename", metavar="F=G[,F=G...]", help="new names of fields")
    tars.add_argument(
        "--select",
        metavar="CONDITION",
        help="samples to take, such as 'cls < 3 and json.width > 640'",
    )
    where(tars)
    label_options(tars)
    tars.add_argument(
        "--keys", metavar="FILE", help="keys of the samples to take, one on each line"
    )

    vision = _kind(
        kinds,
        "torchvision",
        _torchvision,
        "a torchvision data set",
        "torchvision FashionMNIST shards/fashion --root data",
    )
    vision.add_argument("name", help="class in torchvision.datasets")
    vision.add_argument("out", help="folder for the shards")
    vision.add_argument(
        "--root", required=True, metavar="DIR", help="where its files are; nothing is downloaded"
    )
    vision.add_argument(
        "--splits", metavar="S[,S...]", help="which, by torchvision's names (default: all)"
    )


# --- kinds -----------------------------------------------------------------------------------------------------------


def _folder(arguments: argparse.Namespace) -> int:
    from wdstrain.packing.folder import list_folder

    return _convert(arguments, lambda: list_folder(arguments.source, flat=arguments.flat))


def _table(arguments: argparse.Namespace) -> int:
    from wdstrain.packing.table import list_table

    return _convert(
        arguments,
        lambda: list_table(
            arguments.file,
            image=arguments.image,
            labels=_words(arguments.label),
            root=arguments.root,
            header=arguments.header,
            group_by=arguments.group_by,
            split_by=arguments.split_by,
            collect=arguments.on_bad == "quarantine",
        ),
    )


def _hdf5(arguments: argparse.Namespace) -> int:
    from wdstrain.packing.hdf5 import stream_hdf5

    return _convert(
        arguments,
        lambda: stream_hdf5(
            arguments.file,
            dict(arguments.field),
            labels=_words(arguments.label),
            classes=_words(arguments.classes),
            key=arguments.key,
            quality=95 if arguments.quality is None else 100,
        ),
    )


def _arrays(arguments: argparse.Namespace) -> int:
    from wdstrain.packing.arrays import stream_arrays

    return _convert(
        arguments,
        lambda: stream_arrays(
            dict(arguments.field),
            labels=_words(arguments.label),
            classes=_words(arguments.classes),
            quality=95 if arguments.quality is None else 100,
        ),
    )


def _tars(arguments: argparse.Namespace) -> int:
    from wdstrain.packing.tars import TarOptions, stated, stream_tars
    from wdstrain.shards.declare import read_classes

    chosen = TarOptions(
        keep=_words(arguments.keep),
        drop=_words(arguments.drop),
        rename=dict(map(_pair, _words(arguments.rename))),
        select=arguments.select,
        keys=arguments.keys,
        where=arguments.where,
        label=arguments.label,
        classes=None if arguments.classes is None else read_classes(arguments.classes),
    )
    return _convert(
        arguments,
        lambda: stream_tars(arguments.urls, chosen, out=arguments.out, note=print_message),
        lambda options: resumed_in_place(
            arguments.out, stated(arguments.urls, arguments.out, chosen), options
        ),
    )


def _torchvision(arguments: argparse.Namespace) -> int:
    from wdstrain.packing.vision import stream_torchvision

    return _convert(
        arguments,
        lambda: stream_torchvision(arguments.name, arguments.root, splits=_words(arguments.splits)),
    )


def _convert(
    arguments: argparse.Namespace,
    opened: Callable[[], Source],
    resumed: Callable[[Options], Conversion | None] = lambda options: None,
) -> int:
    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    begun = time.monotonic()
    done = resumed(options)
    if done is None:
        source = opened()
        for line in source.source.get("decided", ()):
            print_message(line)
        with ProgressReporter() as teller:

            def tell(step: Step) -> None:
                text = f"{step.bytes / 1e6:.1f} MB" + (
                    f", {step.bad} quarantined" if step.bad else ""
                )
                teller.step(step.title, step.done, step.total, text, "samples")

            done = convert(source, arguments.out, options, tell)
    for label in done.index.labels:
        if label.kind == "class" and len(label.classes) == 1:
            lies = (
                " Is that a folder in which the class folders lie?"
                if source.source.get("kind") == "folder"
                else ""
            )
            print_message(f"note: there is one class only, {label.classes[0]!r}.{lies}")
    seconds = time.monotonic() - begun
    found = {
        "out": arguments.out,
        **facts(done.index),
        "listed": done.listed,
        "quarantined": len(done.bad),
        "limited": done.limited,
        "renamed": done.renamed,
        "classes": done.samples,
        "ignored": done.ignored,
        "decided": done.index.info["source"].get("decided", []),
        "divided": done.divided,
        "kept_shards": done.kept,
        "seconds": round(seconds, 3),
    }
    result(arguments, found, [*summary(done.index), *_told(done, arguments.out, seconds)])
    return 0


def _told(done: Conversion, out: str, seconds: float) -> list[tuple[str, str]]:
    parts = [f"{len(done.index)} packed"]
    parts += [f"{len(done.bad)} quarantined"] if done.bad else []
    parts += [f"{done.limited} beyond --limit"] if done.limited else []
    rows = [("source", f"{done.listed} = {' + '.join(parts)}")]
    if done.bad:
        rows.append(
            (
                "quarantined",
                f"listed with reasons in {os.path.join(out, 'bad.jsonl')}; the first: {done.bad[0].sentence}",
            )
        )
    rows += [
        ("passed over", f"{count} x {reason}") for reason, count in sorted(done.ignored.items())
    ]
    if done.divided:
        rows.append(
            (
                "divided",
                f"{done.divided} pictures are in two splits or more, by rows that name the same picture",
            )
        )
    if done.renamed:
        rows.append(
            (
                "renamed",
                f"{done.renamed} keys; what the source calls them is in {os.path.join(out, 'renamed.jsonl')}",
            )
        )
    names = list(dict.fromkeys(name for counts in done.samples.values() for name in counts if name))
    for name in names[:_MOST_CLASSES]:
        counts = ", ".join(
            f"{split} {counts.get(name, 0)}" for split, counts in done.samples.items()
        )
        rows.append((f"  {name}", counts))
    if len(names) > _MOST_CLASSES:
        rows.append(("  ...", f"{len(names) - _MOST_CLASSES} more classes"))
    if done.kept:
        rows.append(("resumed", f"{done.kept} of its parts were whole already"))
    size_ = sum(shard.bytes for shard in done.index.shards)
    rate = f", {len(done.index) / max(1e-9, seconds):.0f} samples/s, {size_ / 1e6 / max(1e-9, seconds):.0f} MB/s"
    rows.append(("time", f"{seconds:.1f} s{'' if done.kept else rate}"))
    return [*rows, ("shards are in", out)]


# --- words -----------------------------------------------------------------------------------------------------------


def _kind(kinds: Any, name: str, run: Verb, text: str, example: str) -> argparse.ArgumentParser:
    parser = verb(kinds, name, run, text, f"convert {example}")
    group = parser.add_argument_group("packing")
    group.add_argument(
        "--shard-samples",
        type=int,
        metavar="N",
        help="most samples in a shard (default: as many as fit)",
    )
    group.add_argument(
        "--shard-bytes",
        type=size,
        default="256MB",
        metavar="SIZE",
        help="most bytes in a shard (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the shuffle and the split (default: %(default)s)",
    )
    group.add_argument(
        "--no-shuffle", dest="shuffle", action="store_false", help="keep the source's order"
    )
    group.add_argument(
        "--split",
        type=shares,
        metavar="NAME=SHARE,...",
        help="for example train=0.9,val=0.1, by a hash of the key",
    )
    group.add_argument(
        "--stratify",
        action="store_true",
        help="make the shares of the split exact within each class",
    )
    group.add_argument(
        "--resize",
        type=int,
        metavar="N",
        help="make pictures whose shorter side is above N pixels that small",
    )
    group.add_argument(
        "--quality",
        type=int,
        metavar="N",
        help="JPEG quality of what is encoded anew (default: 90); alone: of all",
    )
    group.add_argument(
        "--check",
        choices=("magic", "decode"),
        default="magic",
        help="decode: see that each picture can be decoded",
    )
    group.add_argument(
        "--on-bad",
        choices=("raise", "quarantine"),
        default="raise",
        help="quarantine: list bad samples in bad.jsonl and go on",
    )
    group.add_argument(
        "--jobs",
        type=int,
        default=cores(),
        metavar="N",
        help="processes (default: %(default)s, one per core)",
    )
    group.add_argument(
        "--memory",
        type=size,
        default="1GB",
        metavar="SIZE",
        help="for putting samples in order (default: %(default)s)",
    )
    group.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: on a Ray cluster with a shared file system",
    )
    group.add_argument(
        "--limit", type=int, metavar="N", help="pack N samples only; of a stream, the first N"
    )
    group.add_argument(
        "--resume", action="store_true", help="go on with a conversion that was broken off"
    )
    group.add_argument("--overwrite", action="store_true", help="replace the shards in the folder")
    parser.set_defaults(interrupted=_AGAIN)
    return parser


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _pair(text: str) -> tuple[str, str]:
    name, equals, what = text.partition("=")
    if not (equals and name.strip() and what.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is no pair; write NAME=WHAT")
    return name.strip(), what.strip()
