"""The verb `verify`: read every byte of shards and compare it with the index."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wdstrain.cli.common import result, step_bytes, verb
from wdstrain.cli.flags import given
from wdstrain.inspection.options import VerifyOptions
from wdstrain.report.terminal import ProgressReporter, print_error, print_message
from wdstrain.runtime.byte_sizes import format_size

if TYPE_CHECKING:
    from wdstrain.loader.stats import Finding

_MOST = 20  # findings that are printed one by one


def add_verify(verbs: Any) -> None:
    """Add `verify` to the verbs of the command line."""
    verb(
        verbs,
        "verify",
        _verify,
        "read every byte of shards and compare it with their index",
        "verify shards/photos --decode",
        VerifyOptions,
    )


def _verify(arguments: argparse.Namespace) -> int:
    from wdstrain.inspection.verify.api import Verification, verify

    warnings.filterwarnings("ignore", module=r"PIL\.")  # of images that it can decode
    start = time.monotonic()
    with ProgressReporter() as reporter:

        def progress(so_far: Verification, total: int | None) -> None:
            text = f"{so_far.shards} shards, {len(so_far.findings)} findings"
            step_bytes(reporter, "verifying", so_far.bytes, total, text)

        options = given(arguments, VerifyOptions)
        done = verify(**options, progress=progress)
    seconds = time.monotonic() - start
    rate = done.bytes / 1e6 / max(1e-9, seconds)
    rows = [
        ("shards", str(done.shards)),
        ("samples", str(done.samples)),
        ("size", format_size(done.bytes)),
        ("fields", _counts(done.fields)),
    ]
    if done.columns:
        rows.append(("columns compared", _counts(done.columns)))
    if done.groups:
        rows.append(("groups compared", _counts(done.groups)))
    if done.unindexed:
        text = f"{done.unindexed} of {done.shards} shards: only their structure was checked"
        rows.append(("no checksums", text))
    if options.get("decode"):
        rows.append(("decoded", _counts(done.decoded) or "nothing"))
    if done.not_decoded:
        text = f"{_counts(done.not_decoded)} (unknown types, or more than 1 GiB)"
        rows.append(("not decoded", text))
    if done.ignored:
        ignored = (f"{count} x {reason}" for reason, count in sorted(done.ignored.items()))
        rows.append(("ignored members", ", ".join(ignored)))
    if done.repeated:
        rows.append(("repeated keys", f"{done.repeated} samples, with different bytes"))
    rows.append(("findings", str(len(done.findings)) if done.findings else "none"))
    rows.append(("time", f"{seconds:.1f} s, {rate:.0f} MB/s"))
    result(arguments, {**done.report(), "seconds": round(seconds, 3)}, rows)
    for note in done.notes:
        print_message(f"note: {note}")
    _print_findings(done.findings)
    return 0 if done.ok else 1


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print findings; many of them by kind, with the first of each."""
    if len(findings) <= _MOST:
        for one in findings:
            print_error(one.sentence)
        return
    kinds: dict[tuple[bool, str, str], list[Finding]] = {}
    for one in findings:
        kind = (True, one.field, one.kind) if one.key else (False, one.shard, one.reason)
        kinds.setdefault(kind, []).append(one)
    for same in sorted(kinds.values(), key=len, reverse=True):
        print_error(f"{len(same)} x {same[0].sentence}" if len(same) > 1 else same[0].sentence)
    print_error(f"{len(findings)} findings of {len(kinds)} kinds. To list all: --json")
