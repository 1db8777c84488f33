"""Comparison of a conversion with an earlier one, for `resume`.

An unfinished conversion is resumed only by the same call. A finished one is compared with what the
same call would make now: nothing is written then, and every difference is an error that names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from wdstrain.conversion.listing import Source
from wdstrain.conversion.options import Options
from wdstrain.conversion.output_dir import OutputTransaction, source_in
from wdstrain.conversion.result import ConversionResult, Progress, read_result
from wdstrain.conversion.upload import deliver_result, outgoing
from wdstrain.errors import UsageError
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import check_sizes, load
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.storage.addresses import INDEX_NAME, SWAPPING
from wdstrain.storage.objects import is_object

# Entries of `Source.source` that its files decide, so they are not part of the call.
_FROM_FILES = ("classes", "data", "decided", "origin")

_COUNTS = ("listed", "skipped", "renamed", "samples", "ignored")


def call_of(source: Source, options: Options, former: Index | None = None) -> dict[str, Any]:
    """Return the arguments of a conversion as JSON values, without what its files decide.

    former: the set that it appends to.
    """
    stated = {name: value for name, value in source.source.items() if name not in _FROM_FILES}
    call = {"source": stated, "options": options.saved()}
    if options.append:
        call["append"] = {"set": former.fingerprint if former is not None else None}
    return _plain(call)


def check_call(transaction: OutputTransaction, call: dict[str, Any]) -> None:
    """Record the call of this conversion in its staging directory.

    Raises UsageError if another call began it. `on_error` may differ, and so may the files of the
    source: the error that ended the conversion may have asked to repair one. Shards with changed
    files are written again.
    """
    former = transaction.read_call()
    if former:
        same_on_error = {**call["options"], "on_error": former["options"]["on_error"]}
        differing = differences(former, {"append": {}, **call, "options": same_on_error})
        if differing:
            raise UsageError(
                f"{transaction.out} holds an unfinished conversion of another source or with other "
                f"options: {'; '.join(differing)}. Resume it as it was, choose another folder, or "
                f"start anew with overwrite=True."
            )
    transaction.write_call(call)


def other_conversion(out: str, differing: Sequence[str], hint: str) -> UsageError:
    """Return the error for a folder that holds another finished conversion."""
    return UsageError(
        f"{out} holds a finished conversion of another source or with other options: "
        f"{'; '.join(differing)}. {hint}"
    )


def resumed_in_place(
    out: str, stated: dict[str, Any], options: Options, progress: Progress | None = None
) -> ConversionResult | None:
    """Return the result of a conversion that replaced its own source, which is gone now.

    An interrupted exchange or upload is completed. stated: what is known of the source without
    opening it (`sources.shards.stated`). None: the source is still there and has to be opened.
    """
    if not options.resume or not stated["in_place"]:
        return None
    folder = outgoing(out) if is_object(out) else out
    if not os.path.exists(os.path.join(folder, SWAPPING)):
        path = os.path.join(folder, INDEX_NAME)
        if not os.path.exists(path) or source_in(path).get("in_place") != stated["in_place"]:
            return None
    transaction = OutputTransaction(folder, overwrite=False, resume=True)
    if not transaction.is_complete:
        transaction.leave()
        return None
    index = check_sizes(load(os.path.join(folder, INDEX_NAME)))
    source = index.info.get("source", {})
    former = {
        "source": {name: source.get(name) for name in stated},
        "options": index.info.get("options", {}),
    }
    differing = differences(former, _plain({"source": stated, "options": options.saved()}))
    if differing:
        raise other_conversion(out, differing, "It replaced its source, so nothing can be resumed.")
    result = read_result(folder, index)
    return deliver_result(result, folder, out, progress) if is_object(out) else result


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


def first_difference(former: Index, index: Index) -> list[str]:
    """Return a sentence about the first difference of two sets; [] if they are equal."""
    for was, now in zip_longest(former.labels, index.labels):
        if was != now:
            return [f"the label was {_shown(was)}, is {_shown(now)}"]
    if not former.offsets.has_checksums:
        return ["its index has no checksums to compare with"]
    before, after = _contents(former), _contents(index)
    missing = [key for key in before if key not in after]
    new = [key for key in after if key not in before]
    changed = [key for key, members in before.items() if members != after.get(key, members)]
    for sentence, keys in (
        ("the sample '{}' is not in the source, or not in this split", missing),
        ("the sample '{}' is new", new),
        ("the sample '{}' has changed", changed),
    ):
        if keys:
            more = f", and {len(keys) - 1} more" if len(keys) > 1 else ""
            return [sentence.format(keys[0][1]) + more]
    differing = differences(
        {"": {name: former.info.get(name) for name in _COUNTS}},
        _plain({"": {name: index.info[name] for name in _COUNTS}}),
    )
    if differing:
        return differing
    pairs = list(zip(former.shards, index.shards, strict=False))
    is_same_order = len(former.shards) == len(index.shards) and all(
        (was.name, was.samples, was.bytes) == (now.name, now.samples, now.bytes)
        for was, now in pairs
    )
    if not is_same_order or former.offsets.differences(index.offsets):
        return ["the samples lie in another order"]
    # Two PNGs of one size can have one crc32.
    other = [was.name for was, now in pairs if was.sha256 and was.sha256 != now.sha256]
    return [f"the bytes of {other[0]} differ (sha256)"] if other else []


def _contents(index: Index) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    """Return {(split, key): [(field, size, crc32) of each member]}."""
    shards = np.repeat(np.arange(len(index.shards)), index.counts).tolist()
    keys = index.keys(np.arange(len(index)))
    members = index.offsets.members
    fields = [index.fields[number] for number in members.field.tolist()]
    described = list(zip(fields, members.size.tolist(), members.crc.tolist(), strict=True))
    parts = pairwise(members.first.tolist())
    return {
        (index.shards[shard].split, key): described[slice(*part)]
        for shard, key, part in zip(shards, keys, parts, strict=True)
    }


def _shown(label: ColumnInfo | None) -> str:
    if label is None:
        return "none"
    if not label.classes:
        return f"{label.name} ({label.kind})"
    names = ", ".join(label.classes[:8]) + (", ..." if len(label.classes) > 8 else "")
    return f"{label.name} ({label.kind} of {len(label.classes)}: {names})"


def _plain(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document as it is after it was written and read as JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(document))
    return plain
