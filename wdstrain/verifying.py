"""Reading every shard and comparing it with what is promised of it.

Each shard is walked header by header, its sha256 compared with the index, and where that differs its members' checksums,
so that a finding names shard, key and offset. Nothing is repaired and nothing stops at the first finding.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from wdstrain.checksum import crc32
from wdstrain.errors import WdstrainError
from wdstrain.index_files import is_ours, load
from wdstrain.indexing import Index, Table
from wdstrain.opening import one_of, tars_of
from wdstrain.remote import is_remote, redacted
from wdstrain.storage import Source, Urls, check_finished, expand, is_json, open_source
from wdstrain.tar import samples

_READ = 4 << 20


@dataclass
class Verification:
    """What was read and what was found wrong, a sentence each."""

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    unindexed: int = 0  # shards of which only the structure could be checked
    findings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings


def verify(urls: Urls, progress: Callable[[Verification, int], None] | None = None) -> Verification:
    """Read all shards that `urls` mean. `progress` is told after each shard, with the number of shards in all.

    Raises UsageError for an address that means nothing; what is wrong with shards and indexes is in `findings`.
    """
    result = Verification()
    todo: list[tuple[str, Index | None]] = []
    for path in expand(urls):
        try:
            if not is_remote(path):
                check_finished(os.path.dirname(path))
            if is_json(path) and not is_ours(path):
                todo += [(tar, None) for tar in tars_of(os.path.dirname(path))]
            elif not is_json(path):
                todo.append((path, one_of(path)))
            else:
                index = load(path)
                todo += [(shard.path, index.pick([i])) for i, shard in enumerate(index.shards)]
                listed = {shard.path for shard in index.shards}
                here = [] if is_remote(path) else tars_of(os.path.dirname(path))
                others = [tar for tar in here if tar not in listed]
                result.findings += [f"{tar} lies beside the index, which does not list it." for tar in others]
        except WdstrainError as error:
            result.findings += [str(error)] if str(error) not in result.findings else []
    for path, promised in todo:
        result.findings += _verify_shard(path, promised, result)
        result.shards += 1
        if progress:
            progress(result, len(todo))
    return result


def _verify_shard(path: str, promised: Index | None, result: Verification) -> list[str]:
    findings: list[str] = []
    shown = redacted(path) if is_remote(path) else path
    try:
        with open_source(path) as source:
            result.bytes += source.size
            if promised and source.size != promised.shards[0].bytes:
                findings.append(f"{shown} has {source.size} bytes, its index says {promised.shards[0].bytes}.")
            elif promised:
                findings += _checksums(source, promised)
            found = list(samples(source.read, source.size, shown))
    except WdstrainError as error:
        return [*(one for one in findings if "every field is as packed" not in one), str(error)]
    result.samples += len(found)
    if promised is None:
        result.unindexed += 1
        return findings
    table = Table.of(found, list(promised.fields))
    names = ("start", "stop", "keys", "member_first", "member_field", "member_offset", "member_size")
    differing = [name for name in names if not np.array_equal(getattr(table, name), getattr(promised.table, name))]
    if differing:
        findings.append(f"{shown} holds other samples than its index says ({', '.join(differing)}). Run: wdstrain index on it.")
    return findings


def _checksums(source: Source, promised: Index) -> list[str]:
    """Findings for a shard whose bytes are not those that were packed, by member where the index has their checksums."""
    shard, table = promised.shards[0], promised.table
    digest, offset = hashlib.sha256(), 0
    while shard.sha256 and (chunk := source.read(offset, _READ)):
        digest.update(chunk)
        offset += len(chunk)
    if digest.hexdigest() == shard.sha256 or not shard.sha256:
        return []
    findings = []
    for sample in range(len(promised)):
        rows = range(*table.member_first[sample : sample + 2].tolist())
        for row, (name, start, size) in zip(rows, promised.members(sample), strict=True):
            if len(table.member_crc) and crc32(source.read(start, size)) != table.member_crc[row]:
                where = f"'{promised.key(sample)}', field '{name}' at offset {start}"
                findings.append(f"{shard.shown}: {where}: the bytes are not those that were packed.")
    return findings or [f"{shard.shown}: its sha256 is not the one of the index, though every field is as packed."]
