"""Fuzz targets: functions of bytes that must end in a correct value or a promised error.

    .venv/bin/python -m tests.fuzz.targets TARGET FILE        (run one input again)

A target raises `Broken` if a promise is broken that is stronger than "does not crash". Any error that
the tested code does not promise passes through: IndexError, MemoryError, a hang or a crash is a find.
Results are compared with independent code where it exists: Python's tarfile reads the same tars, and an
image is decoded as a whole and in part.

Bodies of HTTP responses are generated, not fuzzed: an honest server sends the bytes of the object, as
many as the input says, so every delivered byte is known. Status lines, headers, chunks, cuts and bytes
after a response come from the input. `SPLIT` separates the parts of an input.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import struct
import sys
import tarfile
import tempfile
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import urllib3
from isal.isal_zlib import crc32
from PIL import Image

from tests.fuzz import tar_mutations
from wdstrain.decode import codecs, fields, label_fields
from wdstrain.decode.codecs import decode_image
from wdstrain.decode.fields import Field
from wdstrain.decode.jpeg_batch import EncodedImages
from wdstrain.decode.pixels import resize
from wdstrain.decode.transforms import FLIP_DRAW, region
from wdstrain.errors import SampleError, ShardError, WdstrainError
from wdstrain.inspection.repair.recover import recover
from wdstrain.inspection.verify.damaged_tar import Damage, FoundSample, walk_damaged
from wdstrain.inspection.verify.forward_reader import ForwardReader
from wdstrain.order.rng import uniform
from wdstrain.shards import make_index
from wdstrain.shards.header_scans import recall
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import pack_part, save_index, scan, unpack_part
from wdstrain.shards.label import Label
from wdstrain.shards.resolve import open_index
from wdstrain.shards.tar import (
    BLOCK,
    END,
    NO_KEY,
    NOT_A_SAMPLE,
    SkippedMembers,
    header,
    is_not_sample,
    padding,
    samples,
    split_name,
)
from wdstrain.storage import http, http_request, retries

SPLIT = b"\n-- 8< --\n"
MOST_PIXELS = 1 << 20  # of pictures here, so that those which claim to be giants are refused soon


class Broken(AssertionError):
    """A promise is broken, though nothing crashed."""


@dataclass(frozen=True)
class Target:
    """run: the function of bytes. seeds: what a fuzzer begins with. code: the modules under test, or "module:name" of a part of one.

    words: what a fuzzer may put together. mutate: changes that it would hardly find by itself, by random numbers.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    code: tuple[str, ...]
    words: tuple[bytes, ...] = ()
    mutate: Callable[[bytes, Random], bytes] | None = None
    longest: int = 24_576  # bytes of an input


# --- tars ------------------------------------------------------------------------------------------------------------

_SAMPLES: list[tuple[str, dict[str, bytes]]] = [
    ("a/first", {"cls": b"3", "txt": b"one of them"}),
    ("a/second", {"cls": b"", "txt": bytes(range(256)) * 3}),
    ("b" * 90 + "/" + "c" * 40, {"json": b'{"n": 1}', "seg.png": b"\x89PNG"}),
    ("d" * 300, {"npy": b"\x93NUMPY"}),
    ("l\u00e4st", {"txt": b"x" * 512}),
]


def tar_of(found: list[tuple[str, dict[str, bytes]]]) -> bytes:
    """A shard of these samples, by our own headers."""
    parts = [
        header(f"{key}.{name}", len(data)) + data + bytes(padding(len(data)))
        for key, of in found
        for name, data in of.items()
    ]
    return b"".join(parts) + END


def _tar_seeds() -> list[bytes]:
    """Tars of ours and of Python's in each of its formats, with directories and links."""
    found = [tar_of(_SAMPLES), tar_of(_SAMPLES[:1]), tar_of([]) + bytes(20 * BLOCK - 2 * BLOCK)]
    for style in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(
            fileobj=buffer, mode="w", format=style, pax_headers={"comment": "all"}
        ) as tar:
            for kind, name in ((tarfile.DIRTYPE, "a"), (tarfile.SYMTYPE, "a/link.txt")):
                info = tarfile.TarInfo(name)
                info.type = kind
                tar.addfile(info)
            for key, of in _SAMPLES:
                for name, data in of.items():
                    if style != tarfile.USTAR_FORMAT or len(key) < 100:
                        info = tarfile.TarInfo(f"{key}.{name}")
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
        found.append(buffer.getvalue())
    return found


def _mutated_tar(data: bytes, random: Random) -> bytes:
    """A tar damaged once or a few times; what the fuzzer changed in headers may get a checksum that is right."""
    if random.random() < 0.3:
        return tar_mutations.with_sums(data)
    for _ in range(random.choice([1, 1, 2, 3])):
        with suppress(IndexError, ValueError):  # it is no tar any more
            data = random.choice(tar_mutations.KINDS)(data, random)
    return data


def run_tar(data: bytes) -> None:
    """The reader's walk: what it reports lies inside, apart and once, and is what Python's tarfile finds."""
    skipped = SkippedMembers()
    try:
        found = list(samples(_reading(data), len(data), "it", skipped))
    except ShardError:
        return
    at = 0
    for sample in found:
        _must(
            at <= sample.start < sample.stop <= len(data),
            "samples lie apart, in order and inside",
            sample,
        )
        at = sample.start
        for _, offset, size in sample.fields:
            _must(
                at < offset and size >= 0 and offset + size <= sample.stop,
                "members lie apart, in order and inside",
                sample,
            )
            at = offset + size
        at = sample.stop
        _must(
            len({name for name, *_ in sample.fields}) == len(sample.fields),
            "fields have one name each",
            sample,
        )
    _must(len({sample.key for sample in found}) == len(found), "keys come once", found)
    _compare_with_tarfile(data, [one for sample in found for one in _members_of(sample)], skipped)


def _members_of(sample: Any) -> list[tuple[str, int, int]]:
    return [(f"{sample.key}.{name}", offset, size) for name, offset, size in sample.fields]


def _compare_with_tarfile(
    data: bytes, ours: list[tuple[str, int, int]], skipped: SkippedMembers
) -> None:
    """What we take for whole has the members that tarfile sees, which stops without an error where it likes."""
    theirs = []
    with suppress(tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError):
        tar = tarfile.TarFile(fileobj=io.BytesIO(data))
        while (info := tar.next()) is not None:
            if info.isreg():
                theirs.append((info.name, info.offset_data, info.size))
        if not any(data[tar.offset :]):
            aside = skipped.reasons.get(NO_KEY, 0) + skipped.reasons.get(NOT_A_SAMPLE, 0)
            slashed = skipped.reasons.get(
                "a directory", 0
            )  # a regular file to tarfile, where its type says so
            _must(
                aside <= len(theirs) - len(ours) <= aside + slashed,
                "tarfile finds as many",
                (ours, theirs),
            )
    places = {(offset, size): name for name, offset, size in ours}
    for name, offset, size in theirs:
        mine = places.pop((offset, size), None)
        parts = split_name(name)
        plain = data[offset - BLOCK + 257 : offset - BLOCK + 263] == b"ustar\0" or not any(
            data[offset - 167 : offset - 12]
        )
        if (
            mine is not None
        ):  # tarfile takes what stands where ustar has a prefix for one in any header
            _must(
                (parts is not None and ".".join(parts) == mine) or not plain,
                "tarfile reads the same name",
                (mine, name),
            )
        else:
            _must(
                parts is None or is_not_sample(name) or name.endswith("/") or not plain,
                "no member is passed over",
                (name, offset),
            )
    _must(
        not theirs or all(offset > theirs[-1][1] for offset, _ in places),
        "tarfile finds the same",
        places,
    )


def run_written(data: bytes) -> None:
    """Names and data to a tar by our writer, which reads back by us and by tarfile as what it was."""
    given: dict[str, bytes] = {}
    for line in data.split(b"\n"):
        name, _, body = line.partition(b"=")
        if name and b"\0" not in name:
            given[name.decode("utf-8", "surrogateescape")] = body
    made = (
        b"".join(
            header(name, len(body)) + body + bytes(padding(len(body)))
            for name, body in given.items()
        )
        + END
    )
    with tarfile.open(fileobj=io.BytesIO(made), mode="r:", errors="surrogateescape") as tar:
        theirs = [
            (info.name, made[info.offset_data : info.offset_data + info.size])
            for info in tar
            if info.isreg()
        ]
    _must([one for _, one in theirs] == list(given.values()), "tarfile reads the data back", theirs)
    for (read, _), meant in zip(theirs, given, strict=True):
        _must(read.rstrip("/") == meant.rstrip("/"), "tarfile reads the names back", (read, meant))
    wanted = {
        name: body
        for name, body in given.items()
        if split_name(name) and not is_not_sample(name) and not name.endswith("/")
    }
    try:
        found = list(samples(_reading(made), len(made), "it"))
    except ShardError as error:
        keys = [split_name(name) for name in wanted]
        runs = [
            key
            for i, (key, _) in enumerate(filter(None, keys))
            if i == 0 or (before := keys[i - 1]) is None or key != before[0]
        ]
        _must(
            len(set(runs)) < len(runs) or len(set(keys)) < len(keys),
            "what is written can be read",
            error,
        )
        return
    ours = [made[offset : offset + size] for sample in found for _, offset, size in sample.fields]
    _must(ours == list(wanted.values()), "the data comes back", found)
    names = [(sample.key, name) for sample in found for name, *_ in sample.fields]
    _must(names == [split_name(name) for name in wanted], "the names come back", names)


def run_salvage(data: bytes) -> None:
    """The walk past damage: never raises, forward and apart; finds no damage exactly where the reader finds none."""
    read = _reading(data)
    pieces = list(
        walk_damaged(
            read,
            len(data),
            lambda key, name, offset, size: (crc32(read(offset, size)), 0),
            SkippedMembers(),
        )
    )
    found = sorted(
        (one for one in pieces if isinstance(one, FoundSample)), key=lambda one: one.start
    )
    at = 0
    for one in found:
        _must(at <= one.start < one.stop <= len(data), "samples lie apart and inside", one)
        at = one.stop
        for (_, offset, size), crc in zip(one.fields, one.crcs, strict=True):
            _must(
                one.start < offset and offset + size <= one.stop, "members lie in their sample", one
            )
            _must(
                crc == crc32(data[offset : offset + size]), "a checksum is that of its member", one
            )
    damages = [one for one in pieces if isinstance(one, Damage)]
    for damage in damages:
        _must(
            0 <= damage.start <= damage.stop <= len(data) and bool(damage.reason),
            "damages lie inside",
            damage,
        )
    for damage, after in pairwise(damages):
        _must(damage.stop <= after.start, "damages lie apart", damage)
    try:
        whole = list(samples(read, len(data), "it"))
    except ShardError as error:
        keys = [one.key for one in found]
        _must(
            bool(damages or any(one.twice for one in found)) or len(set(keys)) < len(keys),
            "what we refuse is damaged",
            error,
        )
        return
    _must(
        not damages and not any(one.is_suspect or one.twice for one in found),
        "what we read is whole",
        pieces,
    )
    _must(
        [(one.key, one.start, one.stop, one.fields) for one in found] == list(map(tuple, whole)),
        "both walks agree",
        pieces,
    )


def run_rescue(data: bytes) -> None:
    """What repair copies out of a damaged shard of known samples is as it was packed, with its index; inside, without."""
    index = _indexed()
    path = os.path.join(_folder(), "damaged.tar")
    with open(path, "wb") as file:
        file.write(data)
    known = {(key, name): body for key, of in _SAMPLES for name, body in of.items()}
    for promised in (index, None):
        with ForwardReader(path, threading.Event(), lambda count: None) as reader:
            saved = recover(reader, promised)
            whole = list(saved.intact)
        _must(len(whole) == saved.count, "the count is that of the samples", saved)
        for one in whole:
            for name, offset, size, crc in one.members:
                _must(offset >= 0 and offset + size <= len(data), "members lie inside", one)
                _must(
                    crc32(data[offset : offset + size]) == crc,
                    "a checksum is that of its member",
                    one,
                )
                if promised is not None:
                    _must(
                        data[offset : offset + size] == known[one.key, name],
                        "what is copied is what was packed",
                        one,
                    )
        if promised is not None:
            _must(
                saved.count + len(saved.lost) == len(index),
                "each sample is saved or told of",
                saved.lost,
            )
        elif len(whole) < len(index):
            told = saved.lost or saved.gaps
            _must(bool(told) or _is_well_formed(data), "what is missing is told", saved)


def _is_well_formed(data: bytes) -> bool:
    try:
        return list(samples(_reading(data), len(data), "it")) is not None
    except ShardError:
        return False


# --- indexes ---------------------------------------------------------------------------------------------------------


@cache
def _indexed() -> Index:
    """The index of a shard of the samples above, with checksums and labels."""
    path = os.path.join(_folder(), "it.tar")
    with open(path, "wb") as file:
        file.write(tar_of(_SAMPLES))
    index = scan([path])
    crcs = [crc32(body) for _, of in _SAMPLES for body in of.values()]
    labels = (Label("cls", "class", "cls", None, ("no", "yes")), Label("n", "number", "json", "n"))
    return replace(
        index, offsets=index.offsets.replaced(member_crc=np.array(crcs, np.uint32)), labels=labels
    )


def _index_seeds() -> list[bytes]:
    folder = os.path.join(_folder(), "seed")
    os.makedirs(folder, exist_ok=True)
    save_index(_indexed(), folder)
    found = []
    for name in ("index.json", "index.arrow"):
        with open(os.path.join(folder, name), "rb") as file:
            found.append(file.read())
    empty = json.dumps(
        {"shardlist": [{"url": "it.tar", "nsamples": 5}], "wids_version": 1}
    ).encode()
    return [SPLIT.join(found), SPLIT.join([empty, b""])]


def run_index(data: bytes) -> None:
    """Any two files as the index beside a shard: opened, remembered and made anew, whatever loads points inside."""
    document, _, arrays = data.partition(SPLIT)
    folder = os.path.join(_folder(), "shards")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(os.path.join(folder, ".wdstrain"))
    shard = os.path.join(folder, "it.tar")
    with open(shard, "wb") as file:
        file.write(tar_of(_SAMPLES))
    for place in (folder, os.path.join(folder, ".wdstrain")):
        for name, content in (("index.json", document), ("index.arrow", arrays)):
            with open(os.path.join(place, name), "wb") as file:
                file.write(content)
    with suppress(WdstrainError):
        _check_index(open_index([os.path.join(folder, "index.json")]), folder)
    with suppress(WdstrainError):
        _check_index(recall([shard]), folder)
    with suppress(WdstrainError):
        made = make_index.index([shard])
        _check_index(made, folder)
        _must(
            made.keys(np.arange(len(made))) == [key for key, _ in _SAMPLES],
            "an index that is made anew is right",
            made,
        )
        _check_index(open_index([os.path.join(folder, "index.json")]), folder)


def run_part(data: bytes) -> None:
    """What a conversion left beside a shard, which it believes when it goes on."""
    folder = os.path.join(_folder(), "parts")
    try:
        index, _ = unpack_part(data, os.path.join(folder, "it.tar"))
    except ShardError:
        return
    _check_index(index, folder)


def _part_seeds() -> list[bytes]:
    return [pack_part(_indexed(), {"identity": "abc", "bad": [], "places": [0, 1, 2]})]


def _check_index(index: Index, folder: str) -> None:
    """Nothing that an index says can lead outside of its shards, or fail when it is used."""
    table, count = index.offsets, len(index)
    _must(
        sum(shard.samples for shard in index.shards) == count, "the shards hold the samples", index
    )
    sizes = np.repeat(
        [shard.bytes for shard in index.shards], [shard.samples for shard in index.shards]
    )
    for shard in index.shards:
        _must(
            os.path.dirname(shard.path) == folder and os.path.basename(shard.path) == shard.name,
            "shards lie beside",
            shard,
        )
        os.path.exists(shard.path)
        _must(
            isinstance(shard.split, str) and isinstance(shard.sha256, str),
            "what is said of a shard has its kind",
            shard,
        )
    for i in range(count):
        members = index.members(i)
        _must(isinstance(index.key(i), str), "a key is text", i)
        _must(0 <= table.start[i] < table.stop[i] <= sizes[i], "a sample lies in its shard", i)
        for name, offset, size in members:
            _must(isinstance(name, str), "a field is text", name)
            _must(
                table.start[i] <= offset <= offset + size <= table.stop[i] and size >= 0,
                "a member lies in its sample",
                i,
            )
    _must(len(set(index.fields)) == len(index.fields), "fields have one name each", index.fields)
    for label in index.labels:
        words = (
            label.name,
            label.field,
            *label.classes,
            *([] if label.column is None else [label.column]),
        )
        _must(all(isinstance(word, str) for word in words), "labels are words", label)
        _must(label.kind in ("class", "number", "multi"), "labels are of a kind", label)
    _must(isinstance(index.fingerprint, str) and bool(repr(index)), "an index can be shown", index)


_ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2,
        1 << 31,
        1 << 61,
        (1 << 62) - 1,
        1 << 63,
        10**30,
        0.5,
        1e308,
        float("inf"),
        float("nan"),
    ),
    *(
        "",
        "a",
        "..",
        "../it.tar",
        "/it.tar",
        "a\0b",
        "\ud800",
        "it.tar",
        "x" * 5000,
        [],
        {},
        [[]],
        [None],
        {"a": {}},
        ["cls"],
    ),
)


def _mutated_index(data: bytes, random: Random) -> bytes:
    """Odd values in a document, and odd numbers in arrays."""
    document, split, arrays = data.partition(SPLIT)
    if random.random() < 0.5:
        with suppress(ValueError, RecursionError):
            return json.dumps(_with_odd(json.loads(document), random)).encode() + split + arrays
    return document + split + _mutated_arrays(arrays, random)


def _mutated_part(data: bytes, random: Random) -> bytes:
    """Odd numbers in the rows, or odd values in the head, mostly with the id that they should have."""
    return _mutated_arrays(data, random)


def _mutated_arrays(data: bytes, random: Random) -> bytes:
    """An Arrow file with an odd number in a column, with an odd head, or with odd bytes."""
    if random.random() < 0.7:
        with suppress(
            pa.ArrowException, OSError, TypeError, LookupError, ValueError, OverflowError
        ):
            return _rewritten(data, random)  # fails for a file that is damaged already
    damaged = bytearray(data.ljust(8, b"\0"))
    at = random.randrange(len(damaged) // 8) * 8
    damaged[at : at + 8] = struct.pack("<q", random.choice(_NUMBERS))
    return bytes(damaged)


def _rewritten(data: bytes, random: Random) -> bytes:
    """A whole Arrow file with an odd number in a column or with an odd head."""
    reader = pa.ipc.open_file(pa.BufferReader(data))
    batch, metadata = reader.get_batch(0), reader.schema.metadata[b"wdstrain"]
    batch.validate(full=True)
    if random.random() < 0.4 and metadata.startswith(b"{"):
        with suppress(RecursionError):
            metadata = json.dumps(_with_odd(json.loads(metadata), random)).encode()
    else:
        whole = [n for n, kind in enumerate(batch.schema.types) if pa.types.is_integer(kind)]
        place, row = random.choice(whole or [0]), random.randrange(batch.num_rows)
        values, kind = batch.column(place).to_pylist(), batch.schema.types[place]
        values[row] = random.choice([None, *_NUMBERS])
        batch = batch.set_column(place, batch.schema.names[place], pa.array(values, kind))
    sink = pa.BufferOutputStream()
    schema = batch.schema.with_metadata({b"wdstrain": metadata})
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    made: bytes = sink.getvalue().to_pybytes()
    return made


_TABLE = tuple(  # what reads an index's table
    f"wdstrain.shards.index_table:{name}"
    for name in (
        *("from_batch", "_check_schema", "_check_shards", "_checked", "_check_field"),
        *("_numbers", "_field", "_key_bytes", "_members"),
    )
)
_NUMBERS = (-1, 0, 1, 2, 512, 4096, 6000, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63))


def _with_odd(value: Any, random: Random) -> Any:
    """The same document with something odd in one place."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        name = random.choice(sorted(value, key=str))
        if random.random() < 0.1:
            return {key: one for key, one in value.items() if key != name}
        return {**value, name: _with_odd(value[name], random)}
    if isinstance(value, list) and value and random.random() < 0.85:
        at = random.randrange(len(value))
        if random.random() < 0.2:
            return value + [value[at]]
        return value[:at] + [_with_odd(value[at], random)] + value[at + 1 :]
    return random.choice(_ODD)


# --- HTTP ------------------------------------------------------------------------------------------------------------

_OBJECT = b"".join(
    crc32(struct.pack("<I", i)).to_bytes(4, "little") for i in range(512)
)  # each place has bytes of its own
_ADDRESS = "http://server/a.tar"


class _Script(http_request.HTTPConnection):
    """A connection to a server that sends what it is told, answer by answer, and then hangs up."""

    answers: Iterator[bytes] = iter(())

    def _new_conn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.sendall(next(_Script.answers, b""))
        theirs.shutdown(socket.SHUT_WR)
        self._theirs = theirs
        return ours

    def close(self) -> None:
        super().close()
        if hasattr(self, "_theirs"):
            self._theirs.close()


def run_http(data: bytes) -> None:
    """Answers to a request: the bytes of the object where they were asked for, or an error that is promised."""
    parts = [_made(*one.partition(b"\n\n")[::2]) for one in data.split(SPLIT)[:6]]
    pool = urllib3.PoolManager(num_pools=1, maxsize=1, timeout=1.0)
    manager = type("Pool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": _Script})
    pool.pool_classes_by_scheme = {"http": manager, "https": manager}
    quick = _instead(retries, network_timeout=lambda: 0.005, _FIRST_PAUSE=0.001)
    with (
        quick,
        _instead(http_request, _pool_manager=lambda address: pool),
        _instead(http, _HEAD_PATIENCE=0.5),
    ):
        for size in (len(_OBJECT), None):
            _Script.answers = iter(parts + parts)
            with suppress(WdstrainError), http.HttpFile(_ADDRESS, size) as source:
                for offset, length in ((0, 700), (700, 300), (1500, 100), (10, 20)):
                    found = source.read(offset, length)
                    _must(
                        len(found) <= length,
                        "no more comes than was asked for",
                        (offset, len(found)),
                    )
                    _must(
                        found == _OBJECT[offset : offset + len(found)],
                        "bytes are those of the object",
                        (size, offset, found[:40]),
                    )
                    _must(
                        len(found) == min(length, max(0, source.size - offset)),
                        "all comes that is there",
                        (offset, len(found)),
                    )
            pool.clear()
        _Script.answers = iter(parts)
        with suppress(WdstrainError):
            http.read_small("http://server/index.json")
    pool.clear()


def _made(head: bytes, how: bytes) -> bytes:
    """An answer with this head, of the object's bytes that it speaks of. how: in numbers of two bytes, how many, chunks, what then."""
    count, chunk, junk = struct.unpack("<HHH", (how + b"\xff" * 6)[:6])
    head = re.sub(rb"[\r\n]+", b"\n", head).strip(
        b"\n"
    )  # a line is a line: an early end of the head would make the rest a body
    part = re.match(rb"\S+\s+206\b", head)
    span = re.search(rb"(?im)^content-range:[ \t]*bytes (\d{1,9})-", head)
    start = int(span[1]) if span and part else 0
    body = _OBJECT[start : start + count]
    length = re.findall(rb"(?im)^content-length:[ \t]*([^\n]*?)[ \t]*$", head)
    is_plain = (
        len(length) == 1
        and length[0].isdigit()
        and len(length[0]) < 9
        and not re.search(rb"\n[ \t]", head)
    )
    chunked = re.search(rb"(?im)^transfer-encoding:[ \t]*chunked[ \t]*$", head)
    head = head.replace(b"\n", b"\r\n") + b"\r\n\r\n"
    if chunked:
        step = max(1, chunk % 2000)
        pieces = [body[at : at + step] for at in range(0, len(body), step)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces) + (
            b"0\r\n\r\n" if junk % 3 else b""
        )
    elif is_plain and int(length[0]) <= len(body):
        body = body[: int(length[0])] + b"\xee" * (junk % 1000 if junk < 60_000 else 0)
    return head + body


def _http_seeds() -> list[bytes]:
    size = len(_OBJECT)
    whole = b"HTTP/1.1 200 OK\nContent-Length: %d" % size
    part = (
        b'HTTP/1.1 206 Partial Content\nContent-Length: %d\nContent-Range: bytes 0-%d/%d\nETag: "a"'
    )
    first, later = (
        part % (size, size - 1, size),
        b"HTTP/1.1 206 Partial\nContent-Length: %d\nContent-Range: bytes %d-%d/%d",
    )
    busy = b"HTTP/1.1 503 Busy\nRetry-After: 1\nContent-Length: 0"
    dated = b"HTTP/1.1 429 Later\nRetry-After: Mon, 01 Jan 2024 00:00:00 GMT\nContent-Length: 0"
    moved = b"HTTP/1.1 302 Found\nLocation: http://server/b.tar\nContent-Length: 0"
    chunked = b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked"
    page = b"HTTP/1.1 200 OK\nContent-Type: text/html\nContent-Length: 9"
    gzip = b"HTTP/1.1 200 OK\nContent-Encoding: gzip\nContent-Length: 9"
    cut = SPLIT.join(
        [first + b"\n\n" + struct.pack("<H", 300), later % (size - 300, 300, size - 1, size)]
    )
    return [
        whole,
        first,
        cut,
        *(SPLIT.join([one, first]) for one in (busy, dated, moved, chunked, page, gzip)),
    ]


_HTTP_WORDS = (
    *(b"HTTP/1.1 ", b"HTTP/1.0 ", b"206", b"200", b"204", b"304", b"307", b"404", b"412", b"416", b"429", b"503", b"100", b"\n\n"),
    *(b"Content-Length: ", b"Content-Range: bytes ", b"Transfer-Encoding: chunked", b"Retry-After: ", b"Location: ", b"ETag: "),
    *(b"Content-Encoding: deflate", b"Connection: close", b"bytes */2048", b"/*", b"-", b"W/", b"\xb2", b"99999999999999999999"),
    *(b"Content-Type: text/html", b"Content-Type: multipart/byteranges", b"9" * 60, b"2048", b"0-2047/2048", b"Mon, 01 Jan 2024"),
    *(b" +9999999999", b"http://server/", b"https://[::1", b"//", b"700-", b"1500-", SPLIT),
)  # fmt: skip


@contextmanager
def _instead(module: Any, **values: Any) -> Iterator[None]:
    """Names of a module with other values for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# --- fields ----------------------------------------------------------------------------------------------------------

_CLASSES = ("cat", "dog", "7", "1_0")
_LABELS: list[tuple[str | None, tuple[str, ...]]] = [
    (None, ()),
    (None, _CLASSES),
    ("n", ()),
    ("n", _CLASSES),
]


def run_label(data: bytes) -> None:
    """Labels and numbers: a value that the bytes say, or a bad sample."""
    for column, classes in _LABELS:
        one = np.full((), -1, np.int64)
        if _read(label_fields.label("cls", column=column, classes=classes), data, one):
            value = int(one)
            _must(
                value >= 0 and (not classes or value < len(classes)),
                "a class is one of them",
                value,
            )
            if column is None and data[:6] != b"\x93NUMPY":
                said = data.decode("utf-8-sig").strip()
                named = classes.index(said) if said in classes else None
                _must(
                    named == value
                    or (re.fullmatch(r"[+-]?\d+", said) is not None and int(said) == value),
                    "a class is what it says",
                    value,
                )
        many = np.full((len(_CLASSES),), -1, np.float32)
        if column is not None and _read(
            label_fields.label("cls", column=column, classes=_CLASSES, multi=True), data, many
        ):
            _must(set(many.tolist()) <= {0.0, 1.0}, "several classes are ones and zeros", many)
        real = np.full((), -7, np.float32)
        if (
            _read(label_fields.number("n", column=column), data, real)
            and column is None
            and data[:6] != b"\x93NUMPY"
        ):
            said = data.decode("utf-8-sig").strip()
            wanted = float(said)
            _must("_" not in said, "a number is written as numbers are", said)
            _must(np.isinf(wanted) or not np.isinf(real), "a number does not become infinite", said)
            _must(
                bool(np.isnan(wanted))
                or bool(np.isinf(wanted))
                or abs(float(real) - wanted) <= 1e-6 * abs(wanted) + 1e-44,
                "a number is that number",
                said,
            )


def run_document(data: bytes) -> None:
    """JSON and text: a value, or a bad sample."""
    for field in (fields.json(), fields.text()):
        with suppress(ValueError, RecursionError):
            value = field.read(field.names[0], memoryview(data), None, _DRAWS)
            if isinstance(value, str) and isinstance(field, fields.Text):
                _must(
                    value.encode() in (data, data.removeprefix(b"\xef\xbb\xbf")),
                    "a text is its bytes",
                    value,
                )


def run_array(data: bytes) -> None:
    """Arrays: what numpy itself makes of the file where it is whole, never an object, never more memory than bytes."""
    shaped = fields.array("npy", shape=(2, 3), dtype="float32")
    for field in (fields.array("npy"), shaped):
        out = None if field.example is None else np.zeros(field.example.shape, field.example.dtype)
        try:
            value = field.read("npy", memoryview(data), out, _DRAWS)
        except MemoryError:
            raise
        except Exception:
            continue
        value = value if out is None else out
        assert value is not None
        _must(
            not value.dtype.hasobject and value.nbytes <= len(data),
            "an array has no more bytes than its file",
            value.dtype,
        )
        wanted = np.load(io.BytesIO(data), allow_pickle=False)
        same = (
            wanted.dtype == value.dtype
            and wanted.shape == value.shape
            and wanted.tobytes() == value.tobytes()
        )
        _must(
            same,
            "an array is what numpy says",
            (wanted.dtype, wanted.shape, value.dtype, value.shape),
        )
    end = int.from_bytes(data[8:10], "little") + 10
    if shaped.has_plain_layout(data[:end]) and len(data) - end >= 24:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = np.load(io.BytesIO(data), allow_pickle=False)
        _must(
            wanted.tobytes() == data[end : end + 24] and wanted.shape == (2, 3),
            "numbers that are landed are those of the file",
            wanted,
        )


def _read(field: Field, data: bytes, out: np.ndarray[Any, Any]) -> bool:
    """Whether a field can be read; a MemoryError, which the decoder would call a bad sample too, is a find."""
    try:
        field.read(field.names[0], memoryview(data), out, _DRAWS)
    except MemoryError:
        raise
    except Exception:
        return False
    return True


def _label_seeds() -> list[bytes]:
    texts = [
        b"3",
        b" 12\n",
        b"cat",
        b"7",
        b"-1",
        b"1e3",
        b"nan",
        b"-0.5",
        b"1_0",
        b"\xef\xbb\xbf2",
        "\u0663".encode(),
        b"9" * 30,
    ]
    rows = [
        b'{"n": %b}' % value
        for value in (
            b"3",
            b'"dog"',
            b"[]",
            b'["cat", "7"]',
            b"1.0",
            b"1e400",
            b"null",
            b"true",
            b"{}",
        )
    ]
    return texts + rows + [_npy(np.array(3)), _npy(np.array([1.5]))]


def _array_seeds() -> list[bytes]:
    found = [
        _npy(np.arange(6).astype(kind).reshape(2, 3)) for kind in ("f4", ">i2", "c16", "?", "u1")
    ]
    found += [
        _npy(np.asfortranarray(np.ones((2, 3), "f4"))),
        _npy(np.array(["a", "bc"])),
        _npy(np.zeros((0, 7))),
        _npy(np.array(1.0)),
    ]
    found += [
        _npy(np.zeros(2, [("a", "i4"), ("b", "S3")])),
        _npy(np.zeros(2, "M8[s]")),
        _npy(np.ones((2, 3), "f4"), version=(2, 0)),
    ]
    return found + [_npy(np.ones(3, "f4"), version=(3, 0))]


def _npy(value: np.ndarray[Any, Any], version: tuple[int, int] = (1, 0)) -> bytes:
    buffer = io.BytesIO()
    writing: Any = np.lib.format
    writing.write_array(buffer, value, version=version)
    return buffer.getvalue()


_ARRAY_WORDS = (
    *(b"'descr': ", b"'fortran_order': ", b"'shape': ", b"True", b"False", b"'<f4'", b"'|O'", b"'>c16'", b"(", b")", b",", b"()", b"-1"),
    *(b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00", b"\x93NUMPY\x03\x00", b"4611686018427387904", b"[('a', '<i4')]", b"'<U1000000000'", b"'V'"),
)  # fmt: skip


# --- pictures --------------------------------------------------------------------------------------------------------


def run_image(data: bytes) -> None:
    """A picture: pixels, or a bad sample. Its fields resize a region of them, alone and as a row of a batch."""
    with _instead(codecs, MAX_PIXELS=MOST_PIXELS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of odd tags
        whole = None
        with suppress(SampleError):
            whole = decode_image(data)
            _must(
                whole.dtype == np.uint8
                and whole.ndim == 3
                and whole.shape[2] == 3
                and 0 < whole.size <= 3 * MOST_PIXELS,
                "pixels",
                whole.shape,
            )
        draws = uniform(np.array([zlib.crc32(data)]), 27, "fuzz")
        for field in (fields.image(size=(8, 6), augment="rrc+flip"), fields.image(size=16)):
            _compare_image_field(field, data, whole, draws)


def _compare_image_field(field: fields.Image, data: bytes, whole: Any, draws: Any) -> None:
    """The field's pixels are those of the whole picture, resized; a row of a batch has the same pixels."""
    assert field.example is not None
    alone, batch = (np.zeros((1, *field.example.shape), np.uint8) for _ in range(2))
    is_read = False
    with suppress(SampleError):
        field.read("jpg", memoryview(data), alone[0], draws[0])
        is_read = True
    in_batch = bool(field.read_rows(EncodedImages.of(data), [0], batch, draws)) if data else False
    _must(is_read or not in_batch, "an image that decodes in a batch decodes alone", field)
    _must(not in_batch or np.array_equal(alone, batch), "a row of a batch is the same", field)
    if whole is None:  # a JPEG's damage may lie below the region
        _must(
            not is_read or data[:2] == b"\xff\xd8",
            "data that is not an image gives no value",
            field,
        )
        return
    _must(is_read, "a picture makes a value", field)
    assert field.size is not None
    height, width = whole.shape[:2]
    top, left, h, w = region(height, width, field.size, field.augment, draws[0])
    wanted = np.zeros_like(alone[0])
    resize(whole[top : top + h, left : left + w], wanted)
    mirrored = field.augment.flip and draws[0, FLIP_DRAW] < 0.5
    wanted = wanted[:, ::-1] if mirrored else wanted
    _must(np.array_equal(alone[0], wanted), "a value is the resized region of the whole", field)


def _image_seeds() -> list[bytes]:
    pixels = (np.arange(40 * 30 * 3, dtype=np.uint32).reshape(30, 40, 3) * 37 % 256).astype(
        np.uint8
    )
    picture = Image.fromarray(pixels)
    found = []
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        *(("JPEG", "RGB", {"quality": 60, "subsampling": way}) for way in (0, 1, 2)),
        ("JPEG", "RGB", {"progressive": True, "restart_marker_blocks": 2}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        *(("PNG", mode, {}) for mode in ("RGB", "RGBA", "P", "L", "1", "I;16", "LA")),
        ("GIF", "P", {}),
        ("GIF", "L", {"save_all": True, "append_images": [picture.convert("L")]}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        *(
            ("TIFF", "RGB", {"compression": way})
            for way in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits")
        ),
        ("TIFF", "F", {}),
        ("BMP", "RGB", {}),
        ("PPM", "RGB", {}),
        ("PPM", "I", {}),
    ]
    for kind, mode, words in kinds:
        buffer = io.BytesIO()
        picture.convert("L" if mode == "I;16" else mode).convert(mode).save(buffer, kind, **words)
        found.append(buffer.getvalue())
    turned = Image.Exif()
    turned[274] = 6
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", exif=turned)
    found.append(buffer.getvalue())
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", xmp=b'<x:xmpmeta tiff:Orientation="8"/>')
    found.append(buffer.getvalue())
    found.append(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    return found


_IMAGE_WORDS = (
    *(b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xc0", b"\xff\xc2", b"\xff\xc4", b"\xff\xdb", b"\xff\xdd", b"\xff\xe1", b"\xff\xd0"),
    *(b"Exif\0\0", b"IHDR", b"IDAT", b"IEND", b"PLTE", b"tRNS", b"acTL", b"GIF89a", b"RIFF", b"WEBPVP8 ", b"VP8L", b"VP8X", b"II*\0"),
    *(b"tiff:Orientation", b"http://ns.adobe.com/xap/1.0/\0", b"\x12\x01\x03\0\x01\0\0\0", b"\x01\x12\0\x03\0\0\0\x01", b"MM\0*", b"BM", b"P6\n", b"P5\n", b"%!PS", b"MPF\0"),
)  # fmt: skip


# --- parts -----------------------------------------------------------------------------------------------------------

_DRAWS = uniform(np.array([0]), 27, "fuzz")[0]


def _must(holds: bool, promise: str, seen: Any) -> None:
    if not holds:
        raise Broken(f"{promise}: {str(seen)[:500]}")


def _reading(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


@cache
def _folder() -> str:
    """A folder of this process, in memory where that can be."""
    place = tempfile.TemporaryDirectory(
        prefix="fuzzing-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    )
    _FOLDERS.append(place)
    os.environ["XDG_CACHE_HOME"] = os.path.join(place.name, "cache")
    return place.name


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # which go when the process does

_TAR_CODE = ("wdstrain.shards.tar",)
TARGETS = {
    one.name: one
    for one in (
        Target("tar", run_tar, _tar_seeds, ("wdstrain.shards.tar",), (b"ustar\0", b"ustar  \0", b" path=", b" size="), _mutated_tar),
        Target("written", run_written, lambda: [b"a.txt=1\na.cls=2\nb/c.txt=", b"x" * 99 + b"/" + b"y" * 99 + b".txt=z"], _TAR_CODE),
        Target("salvage", run_salvage, _tar_seeds, ("wdstrain.inspection.verify.damaged_tar", "wdstrain.inspection.verify.header_search"), (), _mutated_tar),
        Target("rescue", run_rescue, lambda: _tar_seeds()[:1], ("wdstrain.inspection.repair.recover", "wdstrain.inspection.verify.scan"), (), _mutated_tar),
        Target("index", run_index, _index_seeds, ("wdstrain.shards.index_io", "wdstrain.shards.resolve"), (SPLIT,), _mutated_index),
        Target("part", run_part, _part_seeds, ("wdstrain.shards.index_io:unpack_part", "wdstrain.shards.index_io:_batch", *_TABLE), (), _mutated_part),
        Target("http", run_http, _http_seeds, ("wdstrain.storage.http", "wdstrain.storage.http_response"), _HTTP_WORDS, None, 4096),
        Target("label", run_label, _label_seeds, ("wdstrain.decode.label_fields:Label", "wdstrain.decode.label_fields:Labels", "wdstrain.decode.label_fields:Number", "wdstrain.shards.values:scalar", "wdstrain.decode.label_fields:_whole"), (b'{"n": ',), None, 512),
        Target("document", run_document, lambda: [b'{"a": [1, null, "\\ud83d"]}', "\ufeffsch\u00f6n".encode()], ("wdstrain.decode.fields:Json", "wdstrain.decode.fields:Text")),
        Target("array", run_array, _array_seeds, ("wdstrain.decode.fields:NumpyArray", "wdstrain.shards.values:npy_array", "wdstrain.shards.values:npy_head"), _ARRAY_WORDS, None, 2048),
        Target("image", run_image, _image_seeds, ("wdstrain.decode.codecs", "wdstrain.decode.jpeg_batch", "wdstrain.decode.pixels"), _IMAGE_WORDS, None, 8192),
    )
}  # fmt: skip


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz.targets TARGET FILE\ntargets: {', '.join(TARGETS)}")
    with open(sys.argv[2], "rb") as file:
        TARGETS[sys.argv[1]].run(file.read())
    print("it holds")


if __name__ == "__main__":
    main()
