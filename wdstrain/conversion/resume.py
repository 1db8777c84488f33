"""Comparison of a conversion with an earlier one, for `resume`.

An unfinished conversion is resumed only by the same call. A finished one is compared with what the
same call would make now: nothing is written then, and every difference is an error that names it.
"""

from __future__ import annotations

import json
from typing import Any

from wdstrain.conversion.listing import Source
from wdstrain.conversion.options import Options
from wdstrain.conversion.staging import Staging
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index

# Entries of `Source.source` that its files decide, so they are not part of the call.
_FROM_FILES = ("classes", "data", "decided", "origin")


def call_of(source: Source, options: Options, former: Index | None = None) -> dict[str, Any]:
    """Return the arguments of a conversion as JSON values, without what its files decide.

    former: the set that it appends to.
    """
    stated = {name: value for name, value in source.source.items() if name not in _FROM_FILES}
    call = {"source": stated, "options": options.saved()}
    if options.append:
        call["append"] = {"set": former.fingerprint if former is not None else None}
    return _plain(call)


def check_call(staging: Staging, call: dict[str, Any]) -> None:
    """Record the call of this conversion in its staging directory.

    Raises UsageError if another call began it. `on_error` may differ, and so may the files of the
    source: the error that ended the conversion may have asked to repair one. Shards with changed
    files are written again.
    """
    former = staging.read_call()
    if former:
        same_on_error = {**call["options"], "on_error": former["options"]["on_error"]}
        differing = differences(former, {"append": {}, **call, "options": same_on_error})
        if differing:
            raise UsageError(
                f"{staging.out} holds an unfinished conversion of another source or with other "
                f"options: {'; '.join(differing)}. Resume it as it was, choose another folder, or "
                f"start anew with overwrite=True."
            )
    staging.write_call(call)


def differences(former: dict[str, Any], call: dict[str, Any]) -> list[str]:
    """Return the entries of a call that differ from a former call: "seed was 0, is 3"."""
    differing = []
    for part, values in call.items():
        before = {
            name: value for name, value in former.get(part, {}).items() if name not in _FROM_FILES
        }
        for name in dict.fromkeys([*before, *values]):
            if before.get(name) != values.get(name):
                differing.append(f"{name} was {before.get(name)!r}, is {values.get(name)!r}")
    return differing


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document as it is after it was written and read as JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(document))
    return plain
