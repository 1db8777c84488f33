"""The verb `show`: a table or a contact sheet of samples, as stored or as a loader delivers them."""

from __future__ import annotations

import argparse
from typing import Any

from wdstrain.cli.common import result, verb
from wdstrain.cli.flags import given
from wdstrain.inspection.options import PeekOptions, check_ending

_SHOWN = 24  # samples, unless --limit is given; of each class that is named, a third of it


def add_show(verbs: Any) -> None:
    """Add `show` to the verbs of the command line."""
    verb(
        verbs,
        "show",
        _show,
        "print samples as a table, or draw them as a contact sheet",
        "show shards/photos -o sheet.png --random",
        PeekOptions,
        ("FILE", "contact sheet to write, .png or .html (default: print a table)"),
    )


def _show(arguments: argparse.Namespace) -> int:
    words = given(arguments, PeekOptions)
    words.setdefault("n", _SHOWN // 3 if words.get("classes") else _SHOWN)
    options = PeekOptions(**words)
    if arguments.out:
        check_ending(arguments.out)

    from wdstrain.inspection.show.api import peek  # only now: it loads torch, which takes a second
    from wdstrain.report.terminal import print_message, print_result

    found = peek(**vars(options))
    file = found.save(arguments.out) if arguments.out else None
    if not arguments.json and file is None:
        print_result(repr(found))
        return 0
    for view in found:
        if view.error:
            print_message(f"{view.shard}: '{view.key}' at offset {view.offset}: {view.error}")
    for note in found.notes:
        print_message(note)
    report: dict[str, Any] = {
        "title": found.title,
        "notes": list(found.notes),
        "shown": len(found),
        "broken": found.broken,
        "file": file,
        "samples": [view.as_dict() for view in found],
    }
    broken = str(found.broken) if found.broken else "none"
    rows = [("shown", found.title), ("with an error", broken), ("written to", file or "")]
    result(arguments, report, rows)
    return 0
