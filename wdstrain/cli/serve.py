"""The verb `serve`: a folder of shards over HTTP."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import time
from typing import Any

from wdstrain.cli.common import verb
from wdstrain.report.terminal import print_message, print_result


def add_serve(verbs: Any) -> None:
    """Add `serve` to the verbs of the command line."""
    serve = verb(
        verbs,
        "serve",
        _serve,
        "let other programs and machines read a folder of shards over HTTP",
        "serve shards/photos --port 8000",
    )
    serve.add_argument(
        "folder",
        metavar="DIR",
        help="folder to serve; hidden files and everything outside of it are not served",
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen at; 0.0.0.0 is every address of this machine (default: %(default)s)",
    )
    serve.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port to listen at; 0 chooses a free one (default: %(default)s)",
    )


def _serve(arguments: argparse.Namespace) -> int:
    from wdstrain.serve import Server

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
