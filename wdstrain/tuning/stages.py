"""Inputs for measuring one stage of a loader at a time.

An excerpt is a small local copy of some samples: a loader over it does not wait for storage. With
idle fields or a fixed transform a loader reads and delivers batches, and decodes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wdstrain.decode.decoder import Transform
from wdstrain.decode.fields import Example, Field, read_field
from wdstrain.decode.transforms import Draws
from wdstrain.errors import SampleError
from wdstrain.shards.header_scans import scan
from wdstrain.shards.index import Index
from wdstrain.shards.tar_headers import END, header, padding
from wdstrain.shards.values import Array
from wdstrain.storage.remote import is_remote

_RUNS = 4  # places of the set from which samples are taken
_MAX_EXCERPT = 64 << 20  # bytes

Members = list[tuple[str, bytes]]  # (field, bytes) of one sample


def excerpt(
    index: Index, count: int, path: str, change: Callable[[Members], Members] | None = None
) -> Index:
    """Return the index of a new tar at `path` with about `count` samples from all over the set.

    The excerpt has at most about 64 MiB, and the labels of the set.
    change: returns new members of a sample, such as a smaller image. If it raises SampleError, the
    sample is copied as it is.
    """
    total = max(1, sum(shard.bytes for shard in index.shards))
    count = max(1, min(count, len(index), int(_MAX_EXCERPT * len(index) / total)))
    run = -(-count // _RUNS)
    starts = np.linspace(0, max(0, len(index) - run), _RUNS).astype(np.int64)
    ids = np.unique(
        np.concatenate([np.arange(start, start + run) for start in starts]).clip(0, len(index) - 1)
    )
    with open(path, "wb") as file:
        for number, fields in index.read(ids):
            members = list(fields.items())
            with suppress(SampleError):
                members = change(members) if change is not None else members
            for field, data in members:
                # Samples of several shards may share a key, so the id becomes the key.
                file.write(header(f"{number:012d}.{field}", len(data)) + data)
                file.write(bytes(padding(len(data))))
        file.write(END)
    return replace(scan([path]), labels=index.labels)


def share_in_page_cache(index: Index) -> float | None:
    """Return the share of the shards in the page cache, 0 to 1, sampled at 64 offsets.

    None for remote shards, and where the file system cannot report it.
    """
    if any(is_remote(shard.path) for shard in index.shards):
        return None
    rows = np.linspace(0, len(index) - 1, 64).astype(np.int64)
    hits = 0
    for number, shard in zip(rows.tolist(), index.shard_of(rows).tolist(), strict=True):
        fd = os.open(index.shards[shard].path, os.O_RDONLY)
        try:
            hits += os.preadv(fd, [bytearray(1)], int(index.offsets.start[number]), os.RWF_NOWAIT)
        except BlockingIOError:  # not in the page cache
            pass
        except OSError:
            return None
        finally:
            os.close(fd)
    return hits / len(rows)


def drop_page_cache(index: Index) -> None:
    """Ask the system to drop local shards from the page cache, so that they are read from disk."""
    for shard in index.shards:
        if not is_remote(shard.path):
            fd = os.open(shard.path, os.O_RDONLY)
            with suppress(OSError):
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


@dataclass(frozen=True)
class IdleField:
    """Field that decodes nothing.

    Batch memory stays unchanged; without batch memory every sample has the same value.
    """

    names: tuple[str, ...]
    example: Example | None
    value: Any = None

    @classmethod
    def like(cls, field: Field, index: Index) -> IdleField:
        """Return an idle field with the output of `field` for a sample of a local index."""
        if field.example is not None:
            return cls(tuple(field.names), field.example)
        for _, fields in index.read(range(len(index)), field.names):
            for name, data in fields.items():
                with suppress(Exception):  # a user's field raises anything; try the next sample
                    value = read_field(
                        field, name, memoryview(bytearray(data)), None, np.full(64, 0.5)
                    )
                    return cls(tuple(field.names), None, value)
        return cls(tuple(field.names), None)

    def read(self, name: str, data: memoryview, out: Array | None, draws: Draws) -> Any:
        """Return the fixed value."""
        return self.value


@dataclass(frozen=True)
class IdleTransform:
    """Transform that returns the same example for every sample."""

    example: Mapping[str, Any]

    def __call__(self, sample: dict[str, Any]) -> Mapping[str, Any]:
        return self.example

    @classmethod
    def like(cls, transform: Transform, index: Index, *, takes_rng: bool) -> IdleTransform:
        """Return an idle transform with the output of `transform` for a sample of a local index.

        Raises SampleError if `transform` fails for every sample.
        """
        rng = (np.random.Generator(np.random.Philox(0)),) if takes_rng else ()
        reason = "there is no sample"
        for number, fields in index.read(range(len(index))):
            try:
                return cls(transform({"__key__": index.key(number), **fields}, *rng))
            except Exception as error:  # the user's code may raise anything
                reason = f"{type(error).__name__}: {error}"
        raise SampleError(f"the transform failed for all of {len(index)} samples ({reason}).")
