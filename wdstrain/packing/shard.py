"""One shard: its members written under a temporary name, flushed to the disk, renamed.

The bytes of files are copied verbatim. While they pass by, the sha256 of the shard and the crc32 of each member are taken,
which costs less than writing them.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress

from wdstrain.errors import SourceError, StorageError
from wdstrain.indexing import Index, Shard, Table
from wdstrain.packing.listing import Item
from wdstrain.storage import publish
from wdstrain.tar import END, Sample, header, padding

_CHUNK = 4 << 20  # bytes collected before they are written and hashed


def item_size(item: Item, sizes: Iterable[int]) -> int:
    """Bytes an item takes in a shard, from the sizes of its parts."""
    names = (f"{item.key}.{field}" for field, _ in item.parts)
    return sum(len(header(name, size)) + size + padding(size) for name, size in zip(names, sizes, strict=True))


Tick = Callable[[int, int], None]  # samples and bytes of this shard so far


def write_shard(path: str, items: Iterable[Item], split: str, tick: Tick) -> Index:
    """Write a shard and return the index of it alone. On any failure nothing is left of it. `tick` is told as it grows."""
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.tmp")
    samples: list[Sample] = []
    crcs: list[int] = []
    digest, offset, chunk = hashlib.sha256(), 0, bytearray()
    try:
        with open(temporary, "wb") as file:
            for item in items:
                start, members = offset, []
                for field, content in item.parts:
                    data = content if isinstance(content, bytes) else _contents(content, item.key)
                    head = header(f"{item.key}.{field}", len(data))
                    members.append((field, offset + len(head), len(data)))
                    crcs.append(zlib.crc32(data))
                    chunk += head
                    chunk += data
                    chunk += bytes(padding(len(data)))
                    offset += len(head) + len(data) + padding(len(data))
                samples.append(Sample(item.key, start, offset, members))
                if len(chunk) >= _CHUNK:
                    digest.update(chunk)
                    file.write(chunk)
                    chunk.clear()
                tick(len(samples), offset)
            chunk += END
            digest.update(chunk)
            file.write(chunk)
        publish(temporary, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}. Free some space or choose another folder.") from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    fields: list[str] = []
    table = Table.of(samples, fields, crcs)
    return Index((Shard(path, len(samples), offset + len(END), split, digest.hexdigest()),), tuple(fields), table)


def _contents(path: str, key: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError as error:
        raise SourceError(f"{path} (for '{key}') cannot be read: {error.strerror}.") from error
