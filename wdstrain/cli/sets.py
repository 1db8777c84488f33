"""Verbs that make, change and serve sets of shards: convert, index, remove, serve.

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
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from wdstrain.cli.common import (
    add_options,
    add_verb,
    facts,
    given,
    print_json,
    result,
    summary,
    verb,
)
from wdstrain.conversion.options import Options
from wdstrain.conversion.source_options import (
    ArraysOptions,
    FolderOptions,
    Hdf5Options,
    RemoveOptions,
    TableOptions,
    TarsOptions,
    TorchvisionOptions,
)
from wdstrain.errors import UsageError
from wdstrain.report.printing import counted
from wdstrain.report.terminal import Reporter, print_message, print_result
from wdstrain.runtime.options import REQUIRED, option
from wdstrain.shards.options import CheckedOptions, IndexOptions

if TYPE_CHECKING:
    from wdstrain.conversion.runner import ConversionResult, Step

_INTERRUPTED = (
    "Run the same command with --resume to continue. The output folder is as it was before."
)
_MOST_REASONS = 5  # rows of reasons to skip samples
_MOST_CLASSES = 20  # rows of classes in the summary

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
    if kind == "arrays":
        raise UsageError(
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
    with os.scandir(source) as entries:
        is_folder = {entry.name: entry.is_dir() for entry in entries}
    if any(name == "index.json" or name.endswith(".tar") for name in is_folder):
        return "tars"
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
    for name, options, title, example in _KINDS:
        kind = verb(kinds, name, partial(_convert, options), title, f"convert {example}")
        kind.set_defaults(interrupted=_INTERRUPTED)
        add_options(kind, options, groups={"packing": Options.__dataclass_fields__})


def _convert(kind: type[Any], arguments: argparse.Namespace) -> int:
    with Reporter() as reporter:

        def show(step: Step) -> None:
            skipped = f", {step.bad} skipped" if step.bad else ""
            text = f"{step.bytes / 1e6:.1f} MB{skipped}"
            reporter.step(step.title, step.done, step.total, text, "samples")

        options = kind(**given(arguments, kind), progress=show)

        from wdstrain.conversion.api import run_conversion  # only now: it takes a second

        begun = time.monotonic()
        done = run_conversion(options, print_message)
    out = os.fspath(options.out)
    for label in done.index.labels:
        if label.is_class and len(label.classes) == 1:
            hint = (
                " Is that a folder in which the class folders lie?" if kind is FolderOptions else ""
            )
            print_message(f"note: there is only one class, {label.classes[0]!r}.{hint}")
    seconds = time.monotonic() - begun
    report = {
        "out": out,
        **facts(done.index),
        "listed": done.info["listed"],
        "skipped": len(done.bad),
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
    result(
        arguments,
        report,
        [*summary(done.index), *_rows(done, out, seconds, is_dry=options.dry_run)],
    )
    return 0


def _rows(
    done: ConversionResult, out: str, seconds: float, *, is_dry: bool
) -> list[tuple[str, str]]:
    """Return the rows of the summary. is_dry: nothing was written."""
    parts = [f"{done.packed} {'to pack' if is_dry else 'packed'}"]
    parts += [f"{len(done.bad)} skipped"] if done.bad else []
    parts += [f"{done.limited} beyond --limit"] if done.limited else []
    counts, samples = done.info, done.info["samples"]
    rows = [("source", f"{counts['listed']} = {' + '.join(parts)}")]
    if done.bad:
        listed = f"listed with reasons in {os.path.join(out, 'skipped.jsonl')}; "
        rows.append(("skipped", f"{'' if is_dry else listed}the first: {done.bad[0].sentence}"))
        reasons = list(done.skipped_reasons.items())
        rows += [("", f"{count} x {reason}") for reason, count in reasons[:_MOST_REASONS]]
        if len(reasons) > _MOST_REASONS:
            rows.append(("", f"{len(reasons) - _MOST_REASONS} more reasons"))
    rows += [
        ("passed over", f"{count} x {reason}")
        for reason, count in sorted(counts["ignored"].items())
    ]
    info = done.index.info
    if (split := info.get("split")) and not info.get("appended"):  # shares of the set before
        shares = (
            f"{name} {split['got'].get(name, 0):.1%} ({share:.1%} asked)"
            for name, share in split["shares"].items()
        )
        by = f"; whole groups of {split['group_by']}" if split["group_by"] else ""
        rows.append(("split", ", ".join(shares) + by))
    if counts["divided"]:
        rows.append(
            (
                "divided",
                f"{counts['divided']} images are in two splits or more, as several rows have the same "
                "image",
            )
        )
    if counts["renamed"]:
        names_file = os.path.join(out, "renamed.jsonl")
        place = "" if is_dry else f"; what the source calls them is in {names_file}"
        rows.append(("renamed", f"{counts['renamed']} keys{place}"))
    names = list(dict.fromkeys(name for by_class in samples.values() for name in by_class if name))
    for name in names[:_MOST_CLASSES]:
        line = ", ".join(f"{split} {of.get(name, 0)}" for split, of in samples.items())
        rows.append((f"  {name}", line))
    if len(names) > _MOST_CLASSES:
        rows.append(("  ...", f"{len(names) - _MOST_CLASSES} more classes"))
    if done.kept:
        rows.append(("resumed", f"{done.kept} of its parts were whole already"))
    size_ = sum(shard.bytes for shard in done.index.shards)
    per_second = 1 / max(1e-9, seconds)
    rate = f", {len(done.index) * per_second:.0f} samples/s, {size_ / 1e6 * per_second:.0f} MB/s"
    rows.append(("time", f"{seconds:.1f} s{'' if done.kept or is_dry else rate}"))
    return [*rows, ("shards would be in" if is_dry else "shards are in", out)]


# --- index ---------------------------------------------------------------------------------------


def _index(arguments: argparse.Namespace) -> int:
    from wdstrain.shards.declare import column_rows, index

    made = index(**given(arguments, IndexOptions))
    result(arguments, facts(made), [*summary(made), *column_rows(made)])
    return 0


# --- remove --------------------------------------------------------------------------------------


def _remove(arguments: argparse.Namespace) -> int:
    from wdstrain.conversion.changes import remove

    options = RemoveOptions(**given(arguments, RemoveOptions))
    with Reporter() as reporter:
        done = remove(
            **given(arguments, RemoveOptions),
            progress=lambda copied, total: reporter.step("copying", copied, total, "", "samples"),
        )
    would = "would be " if options.dry_run else ""
    shards = f"{done.rewritten} rewritten, {done.deleted} deleted"
    rows = [
        ("removed", f"{counted(done.removed, 'sample')} {would}removed"),
        ("left", counted(done.samples, "sample")),
        ("shards", f"{would}{shards}" if would else shards),
        ("set", done.folder),
    ]
    result(arguments, vars(done), rows)
    return 0


# --- serve ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServeOptions(CheckedOptions):
    """Options of `serve`."""

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


def _serve(arguments: argparse.Namespace) -> int:
    options = ServeOptions(**given(arguments, ServeOptions))

    from wdstrain.serve import Server

    server, begun = Server(options.folder, options.host, options.port), time.monotonic()
    before, status = signal.signal(signal.SIGTERM, signal.default_int_handler), 0
    try:
        with server:
            print_message(f"serving {server.folder} at {server.url} (Ctrl-C ends)")
            if not server.is_local:
                print_message(
                    f"Everyone who reaches this machine ({socket.gethostname()}) can read this "
                    "folder; there is no password."
                )
            server.wait()
            status = 1  # the server ended by itself
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    seconds, count = time.monotonic() - begun, server.requests
    if arguments.json:
        report = {
            "folder": server.folder,
            "url": server.url,
            "requests": count,
            "bytes": server.bytes,
        }
        print_json({**report, "seconds": round(seconds, 3)})
    else:
        print_result(
            f"served {counted(count, 'request')}, {server.bytes / 1e6:.1f} MB, in {seconds:.0f} s"
        )
    return status


add_index = partial(add_verb, _index, IndexOptions, "index old --columns cls,json.kind")
add_remove = partial(
    add_verb, _remove, RemoveOptions, "remove shards/photos --where \"label == 'blurred'\""
)
add_serve = partial(add_verb, _serve, ServeOptions, "serve shards/photos --port 8000")
