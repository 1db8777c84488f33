"""The verbs that look for damage, and save what it left: `wdstrain verify`, `wdstrain repair`."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wdstrain.cli.words import result, urls, verb
from wdstrain.report.terminal import ProgressReporter, print_message

if TYPE_CHECKING:
    from wdstrain.loader.stats import Finding
from wdstrain.runtime.machine import cores

_MOST = 20  # findings, or shards of a repair, that are shown one by one
_NAMED = 3  # lost samples of one shard that are named


def add_check(verbs: Any) -> None:
    """Add the verbs."""
    verify = verb(
        verbs,
        "verify",
        _verify,
        "read everything and compare it with the index",
        "verify shards/photos --decode",
    )
    urls(verify)
    verify.add_argument(
        "--decode",
        action="store_true",
        help="decode every picture, parse every label, json, npy and txt",
    )
    verify.add_argument(
        "--need",
        default="",
        metavar="F[;F],...",
        help="fields that every sample must have, such as 'jpg;png,cls'",
    )
    verify.add_argument(
        "--jobs", type=int, default=cores(), metavar="N", help="threads (default: one per core)"
    )

    repair = verb(
        verbs,
        "repair",
        _repair,
        "copy what is whole out of damaged shards",
        "repair shards/photos -o shards/saved",
    )
    urls(repair)
    repair.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="DIR",
        help="folder for the repaired shards, not that of the damaged",
    )
    repair.add_argument(
        "--decode", action="store_true", help="leave out samples that cannot be decoded or parsed"
    )
    repair.add_argument("--overwrite", action="store_true", help="replace the shards in the folder")


# --- verbs -----------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    from wdstrain.verifying.doors import Verification, verify

    _quiet()
    begun = time.monotonic()
    with ProgressReporter() as teller:

        def tell(so_far: Verification, total: int | None) -> None:
            text = f"{so_far.shards} shards, {len(so_far.findings)} findings"
            teller.step(
                "verifying",
                so_far.bytes // 10**6,
                None if total is None else total // 10**6,
                text,
                "MB",
            )

        done = verify(
            arguments.urls,
            decode=arguments.decode,
            jobs=arguments.jobs,
            need=arguments.need,
            progress=tell,
        )
    seconds = time.monotonic() - begun
    rows = [
        ("shards", str(done.shards)),
        ("samples", str(done.samples)),
        ("MB", f"{done.bytes / 1e6:.1f}"),
    ]
    rows.append(("fields", _counts(done.fields)))
    if done.columns:
        rows.append(("columns compared", _counts(done.columns)))
    if done.unindexed:
        what = f"{done.unindexed} of {done.shards} shards: no index has any, so only structure was checked"
        rows.append(("without checksums", what))
    if arguments.decode:
        rows.append(("decoded", _counts(done.decoded) or "nothing"))
    if done.not_decoded:
        rows.append(
            (
                "not decoded",
                f"{_counts(done.not_decoded)}: such fields, or ones of more than 1 GiB, are not tried",
            )
        )
    rows += [
        ("passed over", f"{count} x {reason}") for reason, count in sorted(done.ignored.items())
    ]
    if done.repeated:
        rows.append(
            (
                "keys of several shards",
                f"{done.repeated} samples; their bytes differ, so they are no copies",
            )
        )
    rows.append(("findings", str(len(done.findings)) if done.findings else "none"))
    rows.append(("time", f"{seconds:.1f} s, {done.bytes / 1e6 / max(1e-9, seconds):.0f} MB/s"))
    result(arguments, {**done.report(), "seconds": round(seconds, 3)}, rows)
    _tell(done.findings)
    return 0 if done.ok else 1


def _repair(arguments: argparse.Namespace) -> int:
    from wdstrain.verifying.repairing import repair

    _quiet()
    begun = time.monotonic()
    with ProgressReporter() as teller:

        def tell(done: int, total: int | None) -> None:
            teller.step(
                "repairing", done // 10**6, None if total is None else total // 10**6, "", "MB"
            )

        done = repair(
            arguments.urls,
            arguments.out,
            decode=arguments.decode,
            overwrite=arguments.overwrite,
            progress=tell,
        )
    seconds = time.monotonic() - begun
    lost = f"at least {done.lost}" if any(not one.key for one in done.findings) else str(done.lost)
    rows = [
        ("shards", str(done.shards)),
        ("samples copied", str(done.samples)),
        ("samples lost", lost),
    ]
    rows += [
        ("MB", f"{done.bytes / 1e6:.1f}"),
        ("time", f"{seconds:.1f} s"),
        ("shards are in", done.out),
    ]
    result(arguments, {**done.report(), "seconds": round(seconds, 3)}, rows)
    for note in done.notes:
        print_message(f"note: {note}")
    shards: dict[str, list[Finding]] = {}
    for one in done.findings:
        shards.setdefault(one.shard, []).append(one)
    for shard, findings in list(shards.items())[:_MOST]:
        _tell_lost(shard, findings)
    if len(shards) > _MOST:
        print_message(
            f"{len(shards) - _MOST} more shards have lost something; --json gives all of it."
        )
    return 0 if done.ok else 1


# --- words -----------------------------------------------------------------------------------------------------------


def _quiet() -> None:
    """What Pillow warns of in a picture that it can decode is nobody's finding."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _tell(findings: Sequence[Finding]) -> None:
    """Findings one by one, or, where they are many, by kind with the first of each."""
    if len(findings) <= _MOST:
        for one in findings:
            print_message(one.sentence)
        return
    kinds: dict[tuple[bool, str, str], list[Finding]] = {}
    for one in findings:
        kind = (
            (True, one.field, one.kind) if one.key else (False, one.shard, one.reason)
        )  # of a whole shard: each for itself
        kinds.setdefault(kind, []).append(one)
    for same in sorted(kinds.values(), key=len, reverse=True):
        print_message(f"{len(same)} x {same[0].sentence}" if len(same) > 1 else same[0].sentence)
    print_message(
        f"{len(findings)} findings are listed, of {len(kinds)} kinds, the first of each shown; --json gives those that are listed."
    )


def _tell_lost(shard: str, findings: list[Finding]) -> None:
    """What one shard has lost: its samples in one sentence, then what is known by its place alone."""
    lost = [one for one in findings if one.key]
    if lost:
        some = "; ".join(
            f"'{one.key}' ({f'field {one.field} ' if one.field else ''}at offset {one.offset}: {one.reason})"
            for one in lost[:_NAMED]
        )
        more = f"; and {len(lost) - _NAMED} more, which --json names" if len(lost) > _NAMED else ""
        print_message(f"{shard}: {len(lost)} sample{'s' * (len(lost) != 1)} lost: {some}{more}.")
    for one in [one for one in findings if not one.key][:_NAMED]:
        print_message(one.sentence)
