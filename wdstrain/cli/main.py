"""The command line: its verbs, errors and exit statuses.

Each verb parses its words, calls what the package offers, and prints: results to stdout (a JSON object with --json),
everything for people's eyes only to stderr. Exit status 0: done; 1: the work failed or found damage; 2: wrong usage;
130: interrupted. An error is a sentence; --debug shows where it came from.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from wdstrain import __version__
from wdstrain.cli.bench import add_bench
from wdstrain.cli.check import add_check
from wdstrain.cli.convert import add_convert
from wdstrain.cli.info import add_info
from wdstrain.cli.plan import add_plan
from wdstrain.cli.show import add_show
from wdstrain.cli.train import add_training
from wdstrain.cli.words import facts, label_options, result, summary, urls, verb
from wdstrain.errors import WdstrainError
from wdstrain.report.terminal import ProgressReporter, flush_results, print_message, print_result


def entry() -> NoReturn:
    """The console script."""
    for name in (
        "stdout",
        "stderr",
    ):  # closed by whoever began us, and a file of ours must not come to stand there
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    sys.exit(main(sys.argv[1:]))


def main(words: Sequence[str]) -> int:
    """Run one command; returns its exit status."""
    arguments, unknown = _parser().parse_known_args(words)
    if unknown:
        print_message(f"wdstrain: {_unknown(arguments, unknown[0])}")
        return 2
    try:
        status = int(arguments.verb(arguments))
        flush_results()
        return status
    except WdstrainError as error:
        if arguments.debug:
            raise
        print_message(f"wdstrain: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        print_message(f"\nwdstrain: interrupted. {arguments.interrupted}")
        return 130
    except BrokenPipeError:  # whoever read our output has gone: that is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _unknown(arguments: argparse.Namespace, word: str) -> str:
    """What is said of a word that no verb knows, with the option that it resembles."""
    flags = re.findall(r"--[a-z][a-z-]*|-[a-z]\b", arguments.parser.format_usage())
    near = get_close_matches(word.partition("=")[0], flags, 1, 0.5)
    hint = f"Did you mean {near[0]}?" if near else f"See: {arguments.parser.prog} --help"
    return f"{word!r} is none of the options of {arguments.parser.prog}. {hint}"


# --- verbs -----------------------------------------------------------------------------------------------------------


def _index(arguments: argparse.Namespace) -> int:
    from wdstrain.shards.declare import column_rows, read_classes
    from wdstrain.shards.resolve import make_index

    classes = None if arguments.classes is None else read_classes(arguments.classes)
    named = [name.strip() for name in (arguments.columns or "").split(",") if name.strip()]
    index = make_index(arguments.urls, columns=named, label=arguments.label, classes=classes)
    result(arguments, facts(index), [*summary(index), *column_rows(index)])
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from wdstrain.serving import Server

    server, begun = Server(arguments.folder, arguments.host, arguments.port), time.monotonic()
    before, status = signal.signal(signal.SIGTERM, signal.default_int_handler), 0
    try:
        with server:
            print_message(f"serving {server.folder} at {server.url} (Ctrl-C ends)")
            if not server.is_local:
                print_message(
                    f"Everyone who reaches this machine ({socket.gethostname()}) can read this folder; there is no password."
                )
            server.wait()
            status = 1  # nobody ended it
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    seconds, count = time.monotonic() - begun, server.requests
    if arguments.json:
        found = {
            "folder": server.folder,
            "url": server.url,
            "requests": count,
            "bytes": server.bytes,
        }
        print_result(json.dumps({**found, "seconds": round(seconds, 3)}, ensure_ascii=False))
    else:
        print_result(
            f"served {count} request{'s' * (count != 1)}, {server.bytes / 1e6:.1f} MB, in {seconds:.0f} s"
        )
    return status


def _demo(arguments: argparse.Namespace) -> int:
    from wdstrain.demo import demo, next_steps

    with ProgressReporter() as teller:
        rows = demo(arguments.dir, teller)
    result(arguments, dict(rows), rows)
    if not arguments.json:
        print_result("\nNext, with your own data:")
        for step in next_steps(arguments.dir):
            print_result(f"  {step}")
    return 0


# --- words -----------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="wdstrain", description="Train from WebDataset tar shards."
    )
    parser.add_argument("--version", action="version", version=f"wdstrain {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    add_convert(verbs)

    index = verb(
        verbs, "index", _index, "make or refresh the index of shards", "index shards/photos"
    )
    urls(index)
    index.add_argument(
        "--columns",
        metavar="NAME[,NAME...]",
        help="read these fields and entries of JSON into columns, such as cls,json.kind",
    )
    label_options(index)
    add_info(verbs)
    add_check(verbs)

    add_bench(verbs)
    add_show(verbs)
    add_plan(verbs)
    add_training(verbs)

    serve = verb(
        verbs,
        "serve",
        _serve,
        "let other programs and machines read shards over HTTP",
        "serve shards/photos",
    )
    serve.add_argument(
        "folder",
        metavar="DIR",
        help="folder to serve; nothing outside of it is, and no hidden file",
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at; 0.0.0.0: every one of this machine (default: %(default)s)",
    )
    serve.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0: any free one (default: %(default)s)"
    )

    demo = verb(verbs, "demo", _demo, "the whole road on handwritten digits", "demo")
    demo.add_argument("--dir", default="shards", help="folder to work in (default: %(default)s)")
    return parser
