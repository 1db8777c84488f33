"""What is typed: `wdstrain VERB ...`.

Each verb parses its words, calls what the package offers, and prints: results to stdout (a JSON object with --json),
everything for people's eyes only to stderr. Exit status 0: done; 1: the work failed or found damage; 2: wrong usage;
130: interrupted. An error is a sentence; --debug shows where it came from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, NoReturn

from wdstrain import __version__
from wdstrain.console import Teller, say, show, table
from wdstrain.errors import WdstrainError
from wdstrain.indexing import Index

_Verb = Callable[[argparse.Namespace], int]


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main(sys.argv[1:]))


def main(words: Sequence[str]) -> int:
    """Run one command; returns its exit status."""
    arguments = _parser().parse_args(words)
    try:
        status = int(arguments.verb(arguments))
        sys.stdout.flush()
        return status
    except WdstrainError as error:
        if arguments.debug:
            raise
        say(f"wdstrain: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say(f"\nwdstrain: interrupted. {arguments.interrupted}")
        return 130
    except BrokenPipeError:  # whoever read our output has gone: that is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# --- verbs -----------------------------------------------------------------------------------------------------------


def _convert_folder(arguments: argparse.Namespace) -> int:
    from wdstrain.packing.folder import list_folder

    return _convert(arguments, lambda: list_folder(arguments.source, flat=arguments.flat))


def _convert_table(arguments: argparse.Namespace) -> int:
    from wdstrain.packing.table import list_table

    labels = arguments.label.split(",") if arguments.label else []
    return _convert(arguments, lambda: list_table(arguments.file, image=arguments.image, labels=labels, root=arguments.root))


def _convert(arguments: argparse.Namespace, listed: Callable[[], Any]) -> int:
    from wdstrain.packing.convert import Options, convert

    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    listing = listed()
    for reason, count in sorted(listing.ignored.items()):
        say(f"passed over: {count} x {reason}")
    with Teller() as teller:
        index = convert(
            listing,
            arguments.out,
            options,
            lambda done, total, size: teller.step("converting", done, total, f"{size / 1e6:.1f} MB", "samples"),
        )
    rows = [*_summary(index), ("shards are in", arguments.out)]
    _result(arguments, {"out": arguments.out, **_facts(index), "ignored": listing.ignored}, rows)
    return 0


def _index(arguments: argparse.Namespace) -> int:
    from wdstrain.opening import make_index

    index = make_index(arguments.urls)
    _result(arguments, _facts(index), _summary(index))
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from wdstrain.opening import open_index

    index = open_index(arguments.urls, note=say)
    _result(arguments, {**_facts(index), "info": index.info}, _summary(index))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from wdstrain.verifying import verify

    with Teller() as teller:
        done = verify(
            arguments.urls,
            lambda so_far, total: teller.step("verifying", so_far.shards, total, f"{so_far.bytes / 1e6:.1f} MB", "shards"),
        )
    rows = [("shards", str(done.shards)), ("samples", str(done.samples)), ("MB", f"{done.bytes / 1e6:.1f}")]
    if done.unindexed:
        rows.append(("without checksums", f"{done.unindexed} shards have no index; only their structure was checked"))
    rows.append(("findings", str(len(done.findings)) if done.findings else "none"))
    _result(arguments, {**asdict(done), "ok": done.ok}, rows)
    for finding in done.findings:
        say(finding)
    return 0 if done.ok else 1


def _train(arguments: argparse.Namespace) -> int:
    from wdstrain.training.loop import Config, train

    config = Config(**{field.name: getattr(arguments, field.name) for field in fields(Config)})
    with Teller() as teller:
        done = train(arguments.urls, config, arguments.out, val=arguments.val, overwrite=arguments.overwrite, tell=teller)
    last = done.epochs[-1]
    rows = [
        ("epochs", str(len(done.epochs))),
        ("samples/s", f"{last['samples_per_second']:.0f}"),
        ("stall", f"{last['stall']:.1%}"),
    ]
    rows += [("validation", done.task.text(done.val))] if done.val else []
    rows += [("verdict", last["verdict"]), ("run is in", done.folder)]
    _result(arguments, {"out": done.folder, "epochs": done.epochs, "best": done.best}, rows)
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from wdstrain.training.loop import evaluate

    with Teller() as teller:
        task, metrics = evaluate(
            arguments.checkpoint, arguments.urls, num_workers=arguments.num_workers, device=arguments.device, tell=teller
        )
    _result(arguments, metrics, [("samples", str(int(metrics["samples"]))), ("metrics", task.text(metrics))])
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from wdstrain.demo import demo, next_steps

    with Teller() as teller:
        rows = demo(arguments.dir, teller)
    _result(arguments, dict(rows), rows)
    if not arguments.json:
        show("\nNext, with your own data:")
        for step in next_steps(arguments.dir):
            show(f"  {step}")
    return 0


# --- words -----------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wdstrain", description="Train from WebDataset tar shards.")
    parser.add_argument("--version", action="version", version=f"wdstrain {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    again = "Nothing half-made is left, and what was there before is there still; run it again."

    convert = verbs.add_parser("convert", help="make shards of pictures and labels", description="Make shards.")
    kinds = convert.add_subparsers(title="kinds of source", metavar="KIND", required=True)
    folder = _verb(
        kinds, "folder", _convert_folder, "class folders", "convert folder photos/ shards/photos --split train=0.9,val=0.1"
    )
    folder.add_argument("source", help="folder with a folder for each class, or with train/ and val/ of such folders")
    folder.add_argument("out", help="folder for the shards")
    folder.add_argument("--flat", action="store_true", help="pictures without classes")
    _convert_options(folder, again)
    rows = _verb(
        kinds, "table", _convert_table, "a CSV or TSV table", "convert table log.csv shards/log --image path --label angle"
    )
    rows.add_argument("file", help="table with a header")
    rows.add_argument("out", help="folder for the shards")
    rows.add_argument("--image", required=True, metavar="COL", help="column of picture paths")
    rows.add_argument("--label", metavar="COL[,COL...]", help="columns to learn; COL:class or COL:number says which kind")
    rows.add_argument("--root", metavar="DIR", help="where relative paths begin (default: the table's folder)")
    _convert_options(rows, again)

    index = _verb(verbs, "index", _index, "make or refresh the index of shards", "index shards/photos")
    info = _verb(verbs, "info", _info, "what is in shards", "info shards/photos")
    check = _verb(verbs, "verify", _verify, "read everything and compare it with the index", "verify shards/photos")
    for verb in (index, info, check):
        _urls(verb)

    train = _verb(verbs, "train", _train, "train a model on shards", "train shards/photos --out runs/photos --epochs 10")
    _urls(train)
    train.add_argument(
        "--val", nargs="+", metavar="URL", help="shards to validate on (default: the split val, if there is one)"
    )
    train.add_argument("--out", required=True, metavar="DIR", help="folder of the run")
    train.add_argument("--model", default="small", help="small, or a torchvision model such as resnet18 (default: %(default)s)")
    train.add_argument("--label", metavar="NAME", help="which label to learn, where the shards have several")
    train.add_argument("--epochs", type=int, default=10, metavar="N", help="default: %(default)s")
    train.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: %(default)s")
    train.add_argument("--lr", type=float, default=2e-3, metavar="X", help="peak learning rate (default: %(default)s)")
    train.add_argument("--weight-decay", type=float, default=0.05, metavar="X", help="default: %(default)s")
    train.add_argument("--image-size", type=int, default=64, metavar="N", help="side of the pictures (default: %(default)s)")
    train.add_argument("--augment", metavar="A", help="none, flip, rrc or rrc+flip (default: none)")
    train.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    train.add_argument("--overwrite", action="store_true", help="replace an earlier run in the folder")
    train.set_defaults(
        interrupted="Epochs that were finished are in the run's folder; train cannot go on from them yet, --overwrite starts anew."
    )
    evaluate = _verb(
        verbs, "evaluate", _evaluate, "score a checkpoint", "evaluate runs/photos/checkpoints/best.pt 'shards/photos/val-*.tar'"
    )
    evaluate.add_argument("checkpoint", help="file of a run, such as RUN/checkpoints/best.pt")
    _urls(evaluate)
    for verb in (train, evaluate):
        verb.add_argument("--num-workers", type=int, default=0, metavar="N", help="decoding processes; 0: threads (default: 0)")
        verb.add_argument("--device", default="auto", help="cpu, cuda or auto (default: %(default)s)")

    demo = _verb(verbs, "demo", _demo, "the whole road on handwritten digits", "demo")
    demo.add_argument("--dir", default="shards", help="folder to work in (default: %(default)s)")
    return parser


def _verb(parent: Any, name: str, run: _Verb, text: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = parent.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=f"example: wdstrain {example}"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    parser.set_defaults(verb=run, interrupted="Run it again to start anew.")
    return parser


def _urls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="+", metavar="URL", help="folder, index.json, tar, glob or brace pattern of shards")


def _convert_options(parser: argparse.ArgumentParser, interrupted: str) -> None:
    group = parser.add_argument_group("packing")
    group.add_argument("--shard-samples", type=int, metavar="N", help="most samples in a shard (default: as many as fit)")
    group.add_argument(
        "--shard-bytes", type=_bytes, default="256MB", metavar="SIZE", help="most bytes in a shard (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the shuffle and the split (default: %(default)s)")
    group.add_argument("--no-shuffle", dest="shuffle", action="store_false", help="keep the source's order")
    group.add_argument("--split", type=_split, metavar="NAME=SHARE,...", help="for example train=0.9,val=0.1")
    group.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one per core)")
    group.add_argument("--limit", type=int, metavar="N", help="pack N samples only")
    group.add_argument("--overwrite", action="store_true", help="replace the shards in the folder")
    parser.set_defaults(interrupted=interrupted)


def _bytes(text: str) -> int:
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    digits = text.rstrip("BbIiKkMmGg ")
    unit = text[len(digits) :].strip().upper()
    try:
        return int(float(digits) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 256MB") from None


def _split(text: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, share = part.partition("=")
        try:
            if not equals or not name.strip().isidentifier() or name.strip() in shares:
                raise ValueError
            shares[name.strip()] = float(share)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is no share of a split; write for example train=0.9,val=0.1") from None
    return shares


# --- results ---------------------------------------------------------------------------------------------------------


def _result(arguments: argparse.Namespace, facts: dict[str, Any], rows: list[tuple[str, str]]) -> None:
    if arguments.json:
        show(json.dumps(facts, ensure_ascii=False))
    else:
        table(rows)


def _facts(index: Index) -> dict[str, Any]:
    return {
        "samples": len(index),
        "shards": len(index.shards),
        "bytes": sum(shard.bytes for shard in index.shards),
        "splits": _splits(index),
        "fields": list(index.fields),
        "labels": [asdict(label) for label in index.labels],
    }


def _summary(index: Index) -> list[tuple[str, str]]:
    facts = _facts(index)
    rows = [("samples", str(facts["samples"])), ("shards", str(facts["shards"])), ("MB", f"{facts['bytes'] / 1e6:.1f}")]
    if any(index.splits):
        rows.append(("splits", ", ".join(f"{name} {count}" for name, count in facts["splits"].items())))
    rows.append(("fields", ", ".join(index.fields)))
    for label in index.labels:
        some = ", ".join(label.classes[:8]) + (", ..." if len(label.classes) > 8 else "")
        plural = "es" if len(label.classes) != 1 else ""
        what = f"{len(label.classes)} class{plural}: {some}" if label.kind == "class" else "a number"
        rows.append((f"label {label.name}", what))
    return rows


def _splits(index: Index) -> dict[str, int]:
    return {split: sum(shard.samples for shard in index.shards if shard.split == split) for split in index.splits}
