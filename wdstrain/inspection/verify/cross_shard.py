"""Checks over all shards of a set: missing fields, duplicate samples, and leaks between splits.

For each sample its key and some 60 bytes are kept until the end. A key that occurs
in two shards is no finding, since many sets number anew in each shard; equal bytes with it are one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from wdstrain.conversion.listing import split_of
from wdstrain.decode.formats import is_image
from wdstrain.inspection.verify.scan import EXAMPLES, Fields
from wdstrain.inspection.verify.shard_check import ShardCheck
from wdstrain.loader.stats import Finding
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints, Offsets
from wdstrain.shards.selection import group_codes

_NEARLY_ALL = 0.99  # share of the samples from which on a field counts as required
_MAX_PAIRS = 1000  # pairs of shards with duplicates that are reported


class CrossShardCheck:
    """Compares shards with each other. They are added in order.

    need: fields that every sample must have; of "jpg;png" one is enough.
    fields: number of samples that have each field. repeated: samples whose key an earlier shard has
    too, with other bytes; known after `duplicates`.
    """

    def __init__(self, need: Sequence[str]) -> None:
        self._need = need
        self.fields: Counter[str] = Counter()
        self.samples = 0
        self.repeated = 0
        self._labels: set[str] = set()
        self._field_sets: list[tuple[str, dict[Fields, int], dict[Fields, list[tuple[str, int]]]]]
        self._field_sets = []
        self._shards: list[str] = []  # names for messages
        self._splits: list[str] = []
        self._keys: list[Ints] = []
        self._contents: list[Ints] = []
        self._images: list[Ints] = []
        self._tables: list[Offsets] = []

    def add(self, check: ShardCheck, labels: Sequence[str], split: str) -> None:
        """Add a shard. labels: fields that hold labels; split: as its index says, or ""."""
        scan = check.scan
        if scan is None:
            return
        self.samples += len(scan)
        self._labels.update(labels)
        self._field_sets.append((check.shown, dict(scan.field_sets), scan.examples))
        for fields, count in scan.field_sets.items():
            for name in sorted(fields):
                self.fields[name] += count
        self._shards.append(check.shown)
        self._splits.append(split or split_of(os.path.basename(check.path)))
        self._keys.append(scan.key_hashes)
        self._contents.append(scan.content_hashes)
        self._images.append(scan.image_hashes)
        self._tables.append(Offsets.of_arrays((), check.table.rows.columns[:3]))

    def findings(self) -> list[Finding]:
        """Return missing fields, duplicate samples, and images in two splits."""
        if not self._shards:
            return []
        table = Offsets.join(self._tables)
        return [*self._missing_fields(), *self._duplicates(table), *self._shared_images(table)]

    def _missing_fields(self) -> Iterator[Finding]:
        """Yield samples that lack a field which they need, or which nearly all others have."""
        required = [
            *self._need,
            *(field for field in sorted(self._labels) if field not in self._need),
        ]
        counts: Counter[str] = Counter()
        for _, field_sets, _ in self._field_sets:
            for fields, count in field_sets.items():
                counts.update(dict.fromkeys(map(field_kind, fields), count))
        usual = {
            kind: f"no {self._names_of(kind)}, which {count} of {self.samples} samples have"
            for kind, count in counts.items()
            if _NEARLY_ALL * self.samples <= count < self.samples and kind not in required
        }
        for shown, field_sets, examples in self._field_sets:
            for fields, count in field_sets.items():
                kinds = set(map(field_kind, fields))
                lacks = [
                    f"no {names.replace(';', ' or ')}"
                    for names in required
                    if not fields & set(names.split(";"))
                ]
                lacks += [reason for kind, reason in usual.items() if kind not in kinds]
                if not lacks:
                    continue
                reason = " and ".join(lacks)
                for key, start in examples[fields]:
                    yield Finding(shown, key, "", start, f"it has {reason}")
                if count > EXAMPLES:
                    more = f"holds {count - EXAMPLES} more samples that have {reason}"
                    yield Finding(shown, "", "", 0, more)

    def _duplicates(self, table: Offsets) -> Iterator[Finding]:
        """Yield samples that another shard has too, byte for byte: one for each pair of shards."""
        keys, contents = np.concatenate(self._keys), np.concatenate(self._contents)
        shard = self._shard_numbers()
        order = np.lexsort((shard, contents, keys))
        a, b = order[:-1], order[1:]
        same_key = (keys[a] == keys[b]) & (shard[a] != shard[b])
        same = same_key & (contents[a] == contents[b])
        self.repeated = int((same_key & ~same).sum())
        pairs: dict[tuple[int, int], list[int]] = {}
        for at in np.flatnonzero(same).tolist():
            pairs.setdefault((int(shard[a[at]]), int(shard[b[at]])), []).append(at)
        for (first, second), places in sorted(pairs.items())[:_MAX_PAIRS]:
            at = min(places, key=lambda place: int(table.start[b[place]]))
            key, other_key = table.keys_of(np.array([b[at], a[at]]))
            if key == other_key:  # not only equal hashes
                more = f"; so are {len(places) - 1} more of this shard" if len(places) > 1 else ""
                where = f"is in {self._shards[first]} at offset {table.start[a[at]]}{more}"
                reason = f"the same sample, byte for byte, {where}"
                yield Finding(self._shards[second], key, "", int(table.start[b[at]]), reason)
        if len(pairs) > _MAX_PAIRS:
            shown = self._shards[sorted(pairs)[_MAX_PAIRS][1]]
            more = f"so do {len(pairs) - _MAX_PAIRS} more pairs of shards"
            yield Finding(shown, "", "", 0, f"shares samples with another shard; {more}")

    def _shared_images(self, table: Offsets) -> Iterator[Finding]:
        """Yield, for each two splits, the first image that both have in different samples."""
        images, keys = np.concatenate(self._images), np.concatenate(self._keys)
        contents, shard = np.concatenate(self._contents), self._shard_numbers()
        splits = np.array(self._splits, object)[shard]
        for first, second in combinations(sorted(set(filter(None, self._splits))), 2):
            a = np.flatnonzero((splits == first) & (images != 0))
            b = np.flatnonzero((splits == second) & (images != 0))
            if not len(a):
                continue
            a = a[np.argsort(images[a], kind="stable")]
            at = np.searchsorted(images[a], images[b])
            at[at == len(a)] = 0
            a = a[at]
            same = images[a] == images[b]
            same &= (keys[a] != keys[b]) | (contents[a] != contents[b])  # no duplicate sample
            if not same.any():
                continue
            sample, other = b[same][0], a[same][0]
            key, other_key = table.keys_of(np.array([sample, other]))
            count = len(np.unique(images[b[same]]))
            more = f"; so are {count - 1} more images of {second!r}" if count > 1 else ""
            where = f"key {other_key!r} in {self._shards[shard[other]]}{more}"
            reason = f"its image is also in split {first!r}: {where}"
            yield Finding(self._shards[shard[sample]], key, "", int(table.start[sample]), reason)

    def _shard_numbers(self) -> Ints:
        """Return the number of the shard of each sample. int64[samples]"""
        return np.repeat(np.arange(len(self._keys)), [len(part) for part in self._keys])

    def _names_of(self, kind: str) -> str:
        """Return the fields of a kind, as the set names them."""
        return " or ".join(sorted(name for name in self.fields if field_kind(name) == kind))


def field_kind(field: str) -> str:
    """Return the name of a field with one word for all image extensions."""
    before, dot, _ = field.rpartition(".")
    return f"{before}{dot}image" if is_image(field) else field


def group_leaks(index: Index, column: str) -> tuple[list[Finding], int]:
    """Return a finding for each two splits that share groups, and the number of groups.

    column: whose equal values form a group. Samples without a value are in no group. Raises
    UsageError for a column that the index does not have.
    """
    codes = group_codes(index, column)
    names = [shard.split or split_of(shard.name) for shard in index.shards]
    splits = np.repeat(np.array(names, object), index.counts)
    findings = []
    for first, second in combinations(sorted(set(filter(None, names))), 2):
        inside, other = splits == first, np.flatnonzero(splits == second)
        shared = other[np.isin(codes[other], codes[inside])]
        if not len(shared):
            continue
        number = int(shared[0])
        match = int(np.flatnonzero(inside & (codes == codes[number]))[0])
        shard = index.shard_with(number)
        count = len(np.unique(codes[shared]))
        groups = f"{count} groups of {column!r} are" if count > 1 else f"a group of {column!r} is"
        reason = (
            f"{groups} in both splits {first!r} and {second!r} ({len(shared)} samples of "
            f"{second!r}): it has the same {column!r} as key {index.key(match)!r} of {first!r}"
        )
        start = int(index.offsets.start[number])
        findings.append(Finding(shard.shown, index.key(number), "", start, reason))
    return findings, len(np.unique(codes))
