"""Verbs that make, change and serve sets of shards: convert, index, join, remove, serve.

`convert` has one kind for each sort of source. Flags are made from the option classes that the
functions of `wdstrain.conversion.api` take.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from wdstrain.cli.common import (
    Shown,
    Verb,
    add_verb,
    calling,
    facts,
    result,
    summary,
)
from wdstrain.conversion.options import (
    ArraysOptions,
    CocoOptions,
    FolderOptions,
    Hdf5Options,
    JoinOptions,
    Options,
    RemoveOptions,
    TableOptions,
    TarsOptions,
    TorchvisionOptions,
    YoloOptions,
)
from wdstrain.errors import UsageError
from wdstrain.inspection.result import rows_of
from wdstrain.report.printing import counted, printable
from wdstrain.report.terminal import Reporter, print_message
from wdstrain.runtime.options import REQUIRED, option, refuse
from wdstrain.shards.options import CheckedOptions, IndexOptions

if TYPE_CHECKING:
    from wdstrain.conversion.runner import ConversionResult, Step
    from wdstrain.shards.index import Index
    from wdstrain.shards.joining import JoinCounts

_INTERRUPTED = (
    "Run the same command with --resume to continue. The output folder is as it was before."
)

# name, options, title, example
_KINDS: tuple[tuple[str, type[Any], str, str], ...] = (
    (
        "folder",
        FolderOptions,
        "pack class folders",
        "folder photos/ shards/photos --split train=0.9,val=0.1",
    ),
    (
        "table",
        TableOptions,
        "pack the rows of a table (CSV, TSV, JSON lines, Parquet)",
        "table log.csv shards/log --image path --label angle",
    ),
    (
        "hdf5",
        Hdf5Options,
        "pack an HDF5 or PyTables file",
        "hdf5 data.h5 shards/h5 --field png=/images --field cls=/labels",
    ),
    (
        "arrays",
        ArraysOptions,
        "pack .npy and .npz arrays",
        "arrays shards/arrays --field png=images.npy --field cls=labels.npy",
    ),
    (
        "tars",
        TarsOptions,
        "pack existing shards again",
        "tars 'old/*.tar' shards/new --where 'cls < 3' --split train=.9,val=.1",
    ),
    (
        "torchvision",
        TorchvisionOptions,
        "pack a torchvision data set",
        "torchvision FashionMNIST shards/fashion --root data",
    ),
    (
        "coco",
        CocoOptions,
        "pack images with the boxes of a COCO file",
        "coco instances_train.json train/ shards/coco",
    ),
    (
        "yolo",
        YoloOptions,
        "pack a folder of YOLO: images/, labels/ and data.yaml",
        "yolo traffic/ shards/traffic",
    ),
)


def with_kind(words: Sequence[str]) -> Sequence[str]:
    """Return the words of `convert SRC OUT` with the kind of the source added, and print it.

    Words with a kind, or without a known source, are returned unchanged. Raises UsageError for a
    source that may be of two kinds.
    """
    source = next((word for word in words[1:] if not word.startswith("-")), "")
    kind = "" if source in {row[0] for row in _KINDS} else _kind_of_source(source)
    if not kind:
        return words
    refuse(
        kind == "arrays",
        f"{source}: each array has a name.",
        f"Run: wdstrain convert arrays OUT --field NAME={source}",
    )
    if not {"-q", "--quiet"} & {*words}:
        print_message(f"note: {source} is packed as by: wdstrain convert {kind}")
    return [words[0], kind, *words[1:]]


def _kind_of_source(source: str) -> str:
    """Return the kind of a source; "" if it is unknown.

    The name of a file decides, of a folder what is in it.
    """
    from wdstrain.storage.addresses import COMPRESSED, SOURCES  # only now: it loads urllib3

    if not os.path.isdir(source):
        is_tar = source.lower().endswith(".tar") or COMPRESSED.search(source)
        return "tars" if is_tar else SOURCES.get(os.path.splitext(source)[1].lower(), "")
    is_folder = {entry.name: entry.is_dir() for entry in os.scandir(source)}
    if any(name == "index.json" or name.endswith(".tar") for name in is_folder):
        return "tars"
    if {"images", "labels", "data.yaml"} <= is_folder.keys():
        return "yolo"
    folders = sorted(name for name in is_folder if is_folder[name])
    tables = sorted(n for n in is_folder if SOURCES.get(os.path.splitext(n)[1].lower()) == "table")
    is_saved = "dataset_info.json" in is_folder  # by save_to_disk
    plain = [name for name in folders if "=" not in name]
    if tables and plain and not is_saved:
        raise UsageError(
            f"{source} holds the table {tables[0]} and folders such as {plain[0]}.",
            f"Name the table, or state the kind: wdstrain convert folder {source} OUT.",
        )
    return "table" if tables or is_saved or len(plain) < len(folders) else "folder"


def add_convert(verbs: Any, text: str) -> None:
    """Add the verb and its kinds."""
    parser = verbs.add_parser(
        "convert",
        help=text,
        description="Convert a data set into shards. Without KIND, it is guessed from the source.",
        epilog="example: wdstrain convert old/ shards/packed",
    )
    kinds = parser.add_subparsers(title="kinds of source", metavar="KIND", required=True)
    packing = {"packing": Options.__dataclass_fields__}
    for name, options, title, example in _KINDS:
        verb = Verb(options, f"convert {example}", _convert, _INTERRUPTED, packing)
        add_verb(kinds, name, verb, title)


def _convert(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    kind = arguments.verb.options
    with Reporter() as reporter:

        def show(step: Step) -> None:
            text = f"{step.bytes / 1e6:.1f} MB" + f", {step.bad} skipped" * bool(step.bad)
            reporter.step(step.title, step.done, step.total, text, "samples")

        options = kind(**given, progress=show)

        from wdstrain.conversion.api import run_conversion  # only now: it takes a second

        begun = time.monotonic()
        done = run_conversion(options, print_message)
    seconds = max(1e-9, time.monotonic() - begun)
    hint = " Is that a folder in which the class folders lie?" if kind is FolderOptions else ""
    for label in done.index.labels:
        if label.is_class and len(label.classes) == 1:
            print_message(f"note: there is only one class, {label.classes[0]!r}.{hint}")
    report = {
        "out": os.fspath(options.out),
        **facts(done.index),
        "listed": done.info["listed"],
        "skipped": done.info["skipped"],
        "skipped_reasons": done.skipped_reasons,
        "limited": done.limited,
        "renamed": done.info["renamed"],
        "classes": done.info["samples"],
        "ignored": done.info["ignored"],
        "decided": done.index.info["source"].get("decided", []),
        "divided": done.info["divided"],
        "kept_shards": done.kept,
        "seconds": round(seconds, 3),
    }
    rows = [*summary(done.index), *_rows(done, report["out"], seconds, is_dry=options.dry_run)]
    result(arguments, report, rows)
    return 0


def _rows(
    done: ConversionResult, out: str, seconds: float, *, is_dry: bool
) -> list[tuple[str, str]]:
    """Return the rows of the summary. is_dry: nothing was written."""
    info, counts, size = done.info, done.info["samples"], sum(s.bytes for s in done.index.shards)
    packed = {"to pack" if is_dry else "packed": done.packed}
    parts = {**packed, "skipped": info["skipped"], "beyond --limit": done.limited}
    taken = [f"{count} {what}" for what, count in parts.items() if count or what in packed]
    skipped = [f"{count} x {reason}" for reason, count in done.skipped_reasons.items()]
    if done.bad:
        listed = "" if is_dry else f"listed with reasons in {os.path.join(out, 'skipped.jsonl')}; "
        skipped.insert(0, f"{listed}the first: {done.bad[0].sentence}")
    divided = f"{counted(info['divided'], 'image')} {'is' if info['divided'] == 1 else 'are'}"
    place = f"; what the source calls them is in {os.path.join(out, 'renamed.jsonl')}"
    names = dict.fromkeys(name for by_class in counts.values() for name in by_class if name)
    rate = f", {len(done.index) / seconds:.0f} samples/s, {size / 1e6 / seconds:.0f} MB/s"
    return rows_of(
        {
            "source": f"{info['listed']} = {' + '.join(taken)}",
            "skipped": skipped,
            "passed over": [f"{count} x {why}" for why, count in sorted(info["ignored"].items())],
            "split": _shares(done.index.info),
            "divided": f"{divided} in two splits or more, as several rows have the same image"
            if info["divided"]
            else "",
            "renamed": f"{counted(info['renamed'], 'key')}{'' if is_dry else place}"
            if info["renamed"]
            else "",
            "classes": [
                f"{name}: "
                + ", ".join(f"{split} {of.get(name, 0)}" for split, of in counts.items())
                for name in names
            ],
            "resumed": f"{done.kept} of its parts were whole already" if done.kept else "",
            "time": f"{seconds:.1f} s{'' if done.kept or is_dry else rate}",
            "shards would be in" if is_dry else "shards are in": out,
        }
    )


def _shares(info: dict[str, Any]) -> str:
    """Return the shares of the splits that a conversion drew, and those that were asked for."""
    split = info.get("split")
    if not split or info.get("appended"):  # they are those of the set before
        return ""
    shares = (
        f"{name} {split['got'].get(name, 0):.1%} ({share:.1%} asked)"
        for name, share in split["shares"].items()
    )
    by = f"; whole groups of {split['group_by']}" if split["group_by"] else ""
    return ", ".join(shares) + by


# --- other verbs ---------------------------------------------------------------------------------


def _indexed(made: Index, seconds: float) -> Shown:
    columns = [
        (printable(f"column {c.name}"), f"{c.summary}, {c.stored.null_count} samples have none")
        for c in made.columns
    ]
    return facts(made), [*summary(made), *columns], ""


def _joined(done: JoinCounts, seconds: float) -> Shown:
    rows = {
        "matched": f"{done.matched} of {counted(done.samples, 'sample')}",
        "unknown": f"{counted(done.unknown, 'row')} of the table: {', '.join(done.unknown_keys)}"
        if done.unknown
        else "",
        **{
            f"column {name}": f"{'replaced' if name in done.replaced else 'added'}, "
            f"{counted(missing, 'sample')} without a value"
            for name, missing in done.columns.items()
        },
        "time": f"{seconds:.1f} s",
    }
    return {**vars(done), "seconds": seconds}, rows_of(rows), ""


def _remove(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    from wdstrain.conversion.changes import remove

    with Reporter() as reporter:
        done = remove(
            **given,
            progress=lambda copied, total: reporter.step("copying", copied, total, "", "samples"),
        )
    would = "would be " if given.get("dry_run") else ""
    rows = [
        ("removed", f"{counted(done.removed, 'sample')} {would}removed"),
        ("left", counted(done.samples, "sample")),
        ("shards", f"{would}{done.rewritten} rewritten, {done.deleted} deleted"),
        ("set", done.folder),
    ]
    result(arguments, vars(done), rows)
    return 0


@dataclass(frozen=True)
class _ServeOptions(CheckedOptions):
    folder: str = option(
        REQUIRED,
        "folder to serve; hidden files and files outside of it are not served",
        metavar="DIR",
    )
    _: KW_ONLY
    host: str = option(
        "127.0.0.1",
        "address to listen at; 0.0.0.0 lets other machines connect",
        metavar="ADDRESS",
    )
    port: int = option(8000, "port to listen at; 0 chooses a free one", metavar="N", least=0)


def _serve(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    from wdstrain.serve import Server

    begun, status = time.monotonic(), 0
    server = Server(**vars(_ServeOptions(**given)))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as with Ctrl-C
    try:
        with suppress(KeyboardInterrupt), server:
            print_message(f"serving {server.folder} at {server.url} (Ctrl-C ends)")
            if not server.is_local:
                print_message(
                    f"Everyone who reaches this machine ({socket.gethostname()}) can read this "
                    "folder; there is no password."
                )
            server.wait()
            status = 1  # the server ended by itself
    finally:
        signal.signal(signal.SIGTERM, before)
    seconds, sent = time.monotonic() - begun, {"requests": server.requests, "bytes": server.bytes}
    report = {"folder": server.folder, "url": server.url, **sent, "seconds": round(seconds, 3)}
    requests, megabytes = counted(server.requests, "request"), server.bytes / 1e6
    result(arguments, report, [(f"served {requests}, {megabytes:.1f} MB, in {seconds:.0f} s",)])
    return status


VERBS = {
    "index": Verb(
        IndexOptions,
        "index old --columns cls,json.kind",
        calling("shards.declare:index", _indexed),
    ),
    "join": Verb(
        JoinOptions,
        "join shards/photos captions.parquet --on key",
        calling("conversion.changes:join", _joined),
    ),
    "remove": Verb(RemoveOptions, "remove shards/photos --where \"label == 'blurred'\"", _remove),
    "serve": Verb(_ServeOptions, "serve shards/photos --port 8000", _serve),
}
