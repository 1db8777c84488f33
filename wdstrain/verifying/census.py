"""What only the whole set can tell: fields that samples lack, samples that came twice, and pictures in two splits.

A field that nearly all samples have is one that training will ask for; that a few lack it is damage, that a third lack it is
how the set is. Keys that come back in another shard are the custom of many sets, which number anew in each shard; that the same
bytes come back with them is a sample that counts twice, or that stands in training and validation both. So does a picture
that two splits have under different keys. For each sample 32 bytes are kept until the end; keys are read again for what is told.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from wdstrain.decode.image_formats import EXTENSIONS
from wdstrain.loader.stats import Finding
from wdstrain.packing.listing import split_of
from wdstrain.shards.offsets import Ints
from wdstrain.verifying.inspection import Inspection
from wdstrain.verifying.survey import EXAMPLES, Fields

_NEARLY_ALL = 0.99
_MOST = 1000  # pairs of shards that share samples which are told

KeyAt = Callable[[str, int], str]  # (path, offset of a sample) -> its key


class Census:
    """Counts over shards, added in order. need: fields that every sample has; of 'jpg;png' one is enough."""

    def __init__(self, need: Sequence[str]) -> None:
        self._need = need
        self.fields: Counter[str] = Counter()  # samples that have each field
        self.samples = 0
        self.repeated = 0  # samples whose key an earlier shard has too, with other bytes
        self._labels: set[str] = set()
        self._kinds: list[tuple[str, dict[Fields, int], dict[Fields, list[tuple[str, int]]]]] = []
        self._shards: list[tuple[str, str]] = []
        self._names: list[Ints] = []
        self._contents: list[Ints] = []
        self._pictures: list[Ints] = []
        self._splits: list[str] = []
        self._starts: list[Ints] = []

    def add(self, done: Inspection, labels: Sequence[str], split: str) -> None:
        """Take a shard in. labels: the fields that its index names as labels; split: what its index says, or its name."""
        found = done.found
        if found is None:
            return
        self.samples += len(found)
        self._labels.update(labels)
        self._kinds.append((done.shown, dict(found.kinds), found.examples))
        for kind, count in found.kinds.items():
            for name in kind:
                self.fields[name] += count
        self._shards.append((done.path, done.shown))
        self._names.append(found.names)
        self._contents.append(found.contents)
        self._pictures.append(found.pictures)
        self._splits.append(split or split_of(os.path.basename(done.path)))
        self._starts.append(done.starts)

    def missing(self) -> list[Finding]:
        """Samples that lack a field which the rest have, or must have."""
        asked = [one for one in self._need]
        asked += [label for label in sorted(self._labels) if label not in asked]
        counts: Counter[str] = Counter()
        for _, kinds, _ in self._kinds:
            for kind, count in kinds.items():
                for name in {plain(one) for one in kind}:
                    counts[name] += count
        usual = [
            name
            for name, count in counts.items()
            if count >= _NEARLY_ALL * self.samples and count < self.samples
        ]
        wanted = {one: f"no {one.replace(';', ' or ')}" for one in asked}
        some = {
            name: f"no {self._told(name)}, which {counts[name]} of {self.samples} samples have"
            for name in usual
        }
        findings: list[Finding] = []
        for shown, kinds, examples in self._kinds:
            for kind in kinds:
                plain_names = {plain(one) for one in kind}
                lacks = [why for one, why in wanted.items() if not kind & set(one.split(";"))]
                lacks += [
                    why for one, why in some.items() if one not in plain_names and one not in wanted
                ]
                if lacks:
                    reason = f"it has {' and '.join(lacks)}"
                    findings += [
                        Finding(shown, key, "", start, reason) for key, start in examples[kind]
                    ]
                    more = kinds[kind] - EXAMPLES
                    if more > 0:
                        findings.append(
                            Finding(
                                shown,
                                "",
                                "",
                                0,
                                f"holds {more} more samples that have {' and '.join(lacks)}",
                            )
                        )
        return findings

    def twins(self, key_at: KeyAt) -> list[Finding]:
        """Samples that another shard has too, by pairs of shards; counts those that share no more than a key."""
        if len(self._shards) < 2:
            return []
        names, contents = np.concatenate(self._names), np.concatenate(self._contents)
        starts = np.concatenate(self._starts)
        shard = np.repeat(np.arange(len(self._shards)), [len(one) for one in self._names])
        order = np.lexsort((shard, contents, names))
        a, b = order[:-1], order[1:]  # neighbours: int64[samples - 1]
        other = (names[a] == names[b]) & (shard[a] != shard[b])
        same = other & (contents[a] == contents[b])
        self.repeated = int((other & ~same).sum())
        pairs: dict[tuple[int, int], list[int]] = {}
        for at in np.flatnonzero(same).tolist():
            pair = (int(shard[a[at]]), int(shard[b[at]]))
            pairs.setdefault(pair, []).append(at)
        findings: list[Finding] = []
        for (first, second), places in sorted(pairs.items()):
            if len(findings) == _MOST:
                left = f"shares samples with another shard; so do {len(pairs) - _MOST} more pairs of shards"
                findings.append(Finding(self._shards[second][1], "", "", 0, left))
                break
            at = min(places, key=lambda place: int(starts[b[place]]))
            start, before = int(starts[b[at]]), int(starts[a[at]])
            key = key_at(self._shards[second][0], start)
            if key and key == key_at(self._shards[first][0], before):
                more = f"; so are {len(places) - 1} more of this shard" if len(places) > 1 else ""
                reason = f"the same sample, byte for byte, is in {self._shards[first][1]} at offset {before}{more}"
                findings.append(Finding(self._shards[second][1], key, "", start, reason))
        return findings

    def divided(self, key_at: KeyAt) -> list[Finding]:
        """Pictures that two splits have in samples that differ: one finding for each two splits, with the first of them."""
        names = sorted(set(filter(None, self._splits)))
        if len(names) < 2:
            return []
        counts = [len(one) for one in self._pictures]
        pictures, keys = np.concatenate(self._pictures), np.concatenate(self._names)
        contents = np.concatenate(self._contents)
        shard = np.repeat(np.arange(len(counts)), counts)
        split = np.array([names.index(one) if one else -1 for one in self._splits])[shard]
        starts = np.concatenate(self._starts)
        findings: list[Finding] = []
        for first in range(len(names)):
            for second in range(first + 1, len(names)):
                ours, theirs = (
                    np.flatnonzero((split == one) & (pictures != 0)) for one in (first, second)
                )
                ours = ours[np.argsort(pictures[ours], kind="stable")]
                at = np.searchsorted(pictures[ours], pictures[theirs])
                at[at == len(ours)] = 0
                if not len(ours):
                    continue
                a, b = ours[at], theirs
                same = (pictures[a] == pictures[b]) & (
                    (keys[a] != keys[b]) | (contents[a] != contents[b])
                )  # not told as twins
                if not same.any():
                    continue
                before, after = int(a[same][0]), int(b[same][0])
                (path, shown), (other, elsewhere) = (
                    self._shards[shard[after]],
                    self._shards[shard[before]],
                )
                count = len(set(pictures[b[same]].tolist()))
                more = (
                    f"; so are {count - 1} more pictures of '{names[second]}'" if count > 1 else ""
                )
                where = f"also in split '{names[first]}': key {key_at(other, int(starts[before]))!r} in {elsewhere}"
                reason = f"its picture is {where}{more}"
                findings.append(
                    Finding(shown, key_at(path, int(starts[after])), "", int(starts[after]), reason)
                )
        return findings

    def _told(self, name: str) -> str:
        """A field as the set calls it: a picture by all its extensions."""
        return " or ".join(sorted(one for one in self.fields if plain(one) == name))


def plain(field: str) -> str:
    """A field's name with one word for the extensions of pictures, so that jpg and png are the same field."""
    before, dot, kind = field.rpartition(".")
    return f"{before}{dot}picture" if kind in EXTENSIONS else field
