"""The verb `serve`: a folder of shards over HTTP."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import time
from dataclasses import KW_ONLY, dataclass
from typing import Any

from wdstrain.cli.common import verb
from wdstrain.cli.flags import given
from wdstrain.report.terminal import print_message, print_result
from wdstrain.runtime.options import REQUIRED, option
from wdstrain.shards.options import CheckedOptions


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


def add_serve(verbs: Any) -> None:
    """Add `serve` to the verbs of the command line."""
    verb(
        verbs,
        "serve",
        _serve,
        "let other programs and machines read a folder of shards over HTTP",
        "serve shards/photos --port 8000",
        ServeOptions,
    )


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
                    f"Everyone who reaches this machine ({socket.gethostname()}) can read this folder; there is no password."
                )
            server.wait()
            status = 1  # the server ended by itself
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
