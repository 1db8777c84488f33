"""Fuzz targets: functions of bytes that must end in a correct value or a promised error.

    .venv/bin/python -m tests.fuzz.targets TARGET FILE        (run one input again)

A target raises `Broken` if a promise is broken that is stronger than "does not crash". Any error
that the tested code does not promise passes through: IndexError, MemoryError, a hang or a crash is
a find. Results are compared with independent code where it exists: Python's tarfile reads the same
tars, and an image is decoded as a whole and in part.

Bodies of HTTP responses are generated, not fuzzed: an honest server sends the bytes of the object,
as many as the input says, so every delivered byte is known. Status lines, headers, chunks, cuts and
bytes after a response come from the input. `SPLIT` separates the parts of an input.
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
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import urllib3
from isal.isal_zlib import crc32

from tests.fuzz import tar_mutations
from tests.support.indexes import with_checksums
from wdstrain.decode import codecs, fields, labels
from wdstrain.decode.codecs import decode_image, resize
from wdstrain.decode.fields import Field
from wdstrain.decode.transforms import FLIP_DRAW, region
from wdstrain.errors import SampleError, ShardError, WdstrainError
from wdstrain.inspection.repair import recover
from wdstrain.inspection.scan import ShardScan
from wdstrain.order.rng import uniform
from wdstrain.shards import declare
from wdstrain.shards.index import Index, Shard
from wdstrain.shards.index_io import pack_part, save_index, unpack_part
from wdstrain.shards.kinds import ColumnInfo
from wdstrain.shards.offsets import arrow_file
from wdstrain.shards.resolve import open_index, place_of, recall, scan
from wdstrain.shards.tar import (
    NO_KEY,
    NOT_A_SAMPLE,
    CompressedError,
    SkippedMembers,
    is_not_sample,
    samples,
    split_name,
)
from wdstrain.shards.tar_headers import BLOCK, END, header, padding
from wdstrain.storage import http, remote, retries
from wdstrain.storage.files import open_source

SPLIT = b"\n-- 8< --\n"
_IMAGES = Path(__file__).parent.parent / "golden" / "images"
MOST_PIXELS = 1 << 20  # pixels of images here, so that huge claimed sizes are refused soon


class Broken(AssertionError):
    """A broken promise without a crash."""


class Target(NamedTuple):
    """run: the function of bytes. seeds: first inputs of a fuzzer. words: its dictionary. mutate:
    random changes that a fuzzer hardly finds by itself. longest: bytes of an input.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()
    mutate: Callable[[bytes, Random], bytes] | None = None
    longest: int = 24_576


# --- tars ---

_SAMPLES: list[tuple[str, dict[str, bytes]]] = [
    ("a/first", {"cls": b"3", "txt": b"one of them"}),
    ("a/second", {"cls": b"", "txt": bytes(range(256)) * 3}),
    ("b" * 90 + "/" + "c" * 40, {"json": b'{"n": 1}', "seg.png": b"\x89PNG"}),
    ("d" * 300, {"npy": b"\x93NUMPY"}),
    ("l\u00e4st", {"txt": b"x" * 512}),
]


def tar_of(given: list[tuple[str, dict[str, bytes]]]) -> bytes:
    """Return a shard of these samples, by the header writer of the package."""
    members = [(f"{key}.{name}", data) for key, of in given for name, data in of.items()]
    blocks = [header(name, len(data)) + data + bytes(padding(len(data))) for name, data in members]
    return b"".join(blocks) + END


def _tar_seeds() -> list[bytes]:
    """Return tars of the package and of Python's formats, with directories and links."""
    tars = [tar_of(_SAMPLES), tar_of(_SAMPLES[:1]), tar_of([]) + bytes(18 * BLOCK)]
    members = [(f"{key}.{name}", of[name]) for key, of in _SAMPLES for name in of]
    for style in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer, comment = io.BytesIO(), {"comment": "all"}
        with tarfile.open(fileobj=buffer, mode="w", format=style, pax_headers=comment) as tar:
            for kind, name in ((tarfile.DIRTYPE, "a"), (tarfile.SYMTYPE, "a/link.txt")):
                info = tarfile.TarInfo(name)
                info.type = kind
                tar.addfile(info)
            for name, data in members:
                if style != tarfile.USTAR_FORMAT or len(name) < 150:
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        tars.append(buffer.getvalue())
    return tars


def _mutated_tar(data: bytes, random: Random) -> bytes:
    """Damage a tar once or a few times; headers changed by the fuzzer may get a valid checksum."""
    if random.random() < 0.3:
        return tar_mutations.with_sums(data)
    for _ in range(random.choice([1, 1, 2, 3])):
        with suppress(IndexError, ValueError):  # no longer a tar
            data = random.choice([*tar_mutations.KINDS.values()])(data, random)
    return data


def run_tar(data: bytes) -> None:
    """The tar reader reports members that lie inside, apart and once, as tarfile reads them."""
    skipped = SkippedMembers()
    try:
        found = [_place(*sample) for sample in samples(_reading(data), len(data), "it", skipped)]
    except ShardError:
        return
    at, members = 0, []
    for key, start, stop, own in found:
        _must(at <= start < stop <= len(data), "samples lie apart and inside", key)
        at = start
        for name, offset, size in own:
            inside = at < offset and size >= 0 and offset + size <= stop
            _must(inside, "members lie apart, in order and inside", key)
            at = offset + size
            members.append((f"{key}.{name}", offset, size))
        at = stop
        _must(_differ(name for name, *_ in own), "fields have one name each", key)
    _must(_differ(key for key, *_ in found), "keys come once", found)
    _compare_with_tarfile(data, members, skipped)


def _differ(names: Iterable[Any]) -> bool:
    listed = list(names)
    return len(set(listed)) == len(listed)


def _compare_with_tarfile(
    data: bytes, members: list[tuple[str, int, int]], skipped: SkippedMembers
) -> None:
    """Check that accepted members equal tarfile's, which stops without an error at some damage."""
    theirs = []
    with suppress(tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError):
        tar = tarfile.TarFile(fileobj=io.BytesIO(data))
        while (info := tar.next()) is not None:
            if not data[info.offset_data - BLOCK + 124]:
                return  # a size that begins with NUL is 0 for tarfile; GNU tar reads its digits
            if info.isreg():
                theirs.append((info.name, info.offset_data, info.size))
        if not any(data[tar.offset :]):
            least = skipped.get(NO_KEY, 0) + skipped.get(NOT_A_SAMPLE, 0)
            most = least + skipped.get("a directory", 0)  # of which tarfile takes some for files
            count = len(theirs) - len(members)
            _must(least <= count <= most, "tarfile finds as many", (members, theirs))
    places = {(offset, size): name for name, offset, size in members}
    for name, offset, size in theirs:
        own, parts = places.pop((offset, size), None), split_name(name)
        # tarfile uses the place of ustar's prefix in any header
        is_ustar = data[offset - BLOCK + 257 : offset - BLOCK + 263] == b"ustar\0"
        if not is_ustar and any(data[offset - 167 : offset - 12]):
            continue
        if own is not None:
            is_same = parts is not None and ".".join(parts) == own
            _must(is_same, "tarfile reads the same name", (own, name))
        else:
            is_no_sample = parts is None or is_not_sample(name) or name.endswith("/")
            _must(is_no_sample, "no member is passed over", (name, offset))
    last = theirs[-1][1] if theirs else -1
    _must(not theirs or all(at > last for at, _ in places), "tarfile finds the same", places)


def _written(name: str, data: bytes) -> str:
    """Write a file below the folder of this process, and return its path."""
    path = os.path.join(_folder(), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return path


def run_salvage(data: bytes) -> None:
    """The scan past damage refuses compressed files only, goes forward, and reports damage exactly if
    the reader raises.
    """
    try:
        with open_source(_written("damaged.tar", data)) as source:
            scan = ShardScan(source, lambda count: None)
            found = list(scan.samples())
            offsets = scan.index(Shard("it.tar", 0, 0)).offsets
    except CompressedError:
        return
    starts, stops = offsets.start.tolist(), offsets.stop.tolist()
    at = 0
    for (_, by_field, _), start, stop in zip(found, starts, stops, strict=True):
        members = by_field.values()
        _must(at <= start < stop <= len(data), "samples lie apart and inside", (start, stop))
        at = stop
        for _, offset, size, crc in members:
            _must(start < offset and offset + size <= stop, "members lie in their sample", members)
            _must(crc == crc32(data[offset : offset + size]), "a checksum is right", members)
    at = 0
    for damage in scan.damages:
        span = re.search("; bytes ([0-9]+) to ([0-9]+) hold no sample$", damage.reason)
        start, stop = map(int, span.groups()) if span else (damage.offset, damage.offset)
        _must(at <= start <= stop <= len(data), "damages lie apart, inside", damage)
        _must(start == damage.offset and damage.reason[0] != ";", "damages have reasons", damage)
        at = stop
    faults = scan.damages or scan.faults
    try:
        intact = list(samples(_reading(data), len(data), "it"))
    except ShardError as error:
        _must(bool(faults), "refused tars are damaged", error)
        return
    _must(not faults, "accepted tars are intact", faults)
    rows = zip(found, starts, stops, strict=True)
    walked = [(key, a, b, [m[:3] for m in of.values()]) for (key, of, _), a, b in rows]
    _must(walked == [_place(*sample) for sample in intact], "both walks agree", walked)


def _place(key: str, fields: dict[str, Any]) -> tuple[Any, ...]:
    """Return key, first and last byte, and (field, offset, size) of the members of a sample."""
    held = list(fields.values())
    return key, held[0].start, held[-1].stop, [(n, m.offset, m.size) for n, m in fields.items()]


def run_rescue(data: bytes) -> None:
    """Repair saves samples of a damaged shard as they were packed with an index, and inside without."""
    index, path = _indexed(), _written("damaged.tar", data)
    known = {(key, name): body for key, of in _SAMPLES for name, body in of.items()}
    for promised in (index, None):
        try:
            with open_source(path) as source:
                expected = promised or Index((Shard(path, 0, 0),))
                check = recover(ShardScan(source, lambda count: None), expected)
                intact, findings = check.found, check.findings
        except CompressedError:
            return
        for number in range(len(intact)):
            key, members = intact.key(number), intact.members(number)
            sums = intact.offsets.members_of(np.array([number])).crc.tolist()
            for (name, offset, size), crc in zip(members, sums, strict=True):
                body = data[offset : offset + size]
                _must(offset >= 0 and offset + size <= len(data), "members lie inside", members)
                _must(crc32(body) == crc, "a checksum is that of its member", members)
                is_packed = promised is None or body == known[key, name]
                _must(is_packed, "copied samples equal packed samples", members)
        if promised is not None:
            lost = {finding.key for finding in findings if finding.key}
            _must(len(intact) + len(lost) == len(index), "each sample is saved or reported", lost)
        elif len(intact) < len(index):
            _must(bool(findings) or _is_well_formed(data), "missing samples are reported", intact)


def _is_well_formed(data: bytes) -> bool:
    try:
        return list(samples(_reading(data), len(data), "it")) is not None
    except ShardError:
        return False


# --- indexes ---


@cache
def _indexed() -> Index:
    """The index of a shard of the samples above, with checksums and labels."""
    path = _written("it.tar", tar_of(_SAMPLES))
    labels = (
        ColumnInfo("cls", "class", "cls", None, ("no", "yes")),
        ColumnInfo("n", "number", "json", "n"),
    )
    return replace(with_checksums(scan([path])), labels=labels)


def _index_seeds() -> list[bytes]:
    folder = os.path.dirname(_written("seed/index.json", b""))
    save_index(_indexed(), folder)
    names = ("index.json", "index.arrow")
    documents = [Path(folder, name).read_bytes() for name in names]
    empty = {"shardlist": [{"url": "it.tar", "nsamples": 5}], "wids_version": 1}
    return [SPLIT.join(documents), json.dumps(empty).encode() + SPLIT]


def run_index(data: bytes) -> None:
    """Any two files as the index beside a shard: opened, cached and rebuilt; entries lie inside."""
    document, _, arrays = data.partition(SPLIT)
    shutil.rmtree(os.path.join(_folder(), "shards"), ignore_errors=True)
    shard = _written("shards/it.tar", tar_of(_SAMPLES))
    listed = _written("shards/index.json", document)
    for path in ("shards/index.arrow", place_of(shard)):
        _written(path, arrays)
    folder = os.path.dirname(shard)
    with suppress(WdstrainError):
        _check_index(open_index([listed]), folder)
    with suppress(WdstrainError):
        for index in recall([shard]).values():
            _check_index(index, folder)
    with suppress(WdstrainError):
        rebuilt = declare.index([shard])
        _check_index(rebuilt, folder)
        keys = [key for key, _ in _SAMPLES]
        _must(rebuilt.keys(np.arange(len(keys))) == keys, "a rebuilt index is right", rebuilt)
        _check_index(open_index([listed]), folder)


def run_part(data: bytes) -> None:
    """Any index part that a conversion left beside a shard and uses when it resumes."""
    folder = os.path.join(_folder(), "parts")
    try:
        index, _ = unpack_part(data, os.path.join(folder, "it.tar"))
    except ShardError:
        return
    _check_index(index, folder)


def _part_seeds() -> list[bytes]:
    return [pack_part(_indexed(), {"identity": "abc", "bad": [], "places": [0, 1, 2]})]


def _check_index(index: Index, folder: str) -> None:
    """Check that no value of an index leads outside of its shards, or fails when it is used."""
    table, count, shards = index.offsets, len(index), index.shards
    _must(sum(shard.samples for shard in shards) == count, "the shards hold the samples", index)
    sizes = np.repeat([shard.bytes for shard in shards], [shard.samples for shard in shards])
    for shard in shards:
        is_beside = os.path.split(shard.path) == (folder, shard.name)
        _must(is_beside, "shards lie beside", shard)
        os.path.exists(shard.path)
        are_texts = isinstance(shard.split, str) and isinstance(shard.sha256, str)
        _must(are_texts, "splits and checksums are texts", shard)
    for i in range(count):
        low, high = table.start[i], table.stop[i]
        _must(isinstance(index.key(i), str), "a key is text", i)
        _must(0 <= low < high <= sizes[i], "a sample lies in its shard", i)
        for name, offset, size in index.members(i):
            is_inside = size >= 0 and low <= offset <= offset + size <= high
            _must(isinstance(name, str) and is_inside, "a member lies in its sample", (i, name))
    _must(_differ(index.fields), "fields have one name each", index.fields)
    for label in index.labels:
        words = [label.name, label.field, *label.classes, label.entry or ""]
        _must(all(isinstance(word, str) for word in words), "labels are words", label)
        _must(label.kind in ("class", "flag", "number", "multi"), "labels are of a kind", label)
    _must(isinstance(index.fingerprint, str) and bool(repr(index)), "an index can be shown", index)


_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 1 << 31, 1 << 61, (1 << 62) - 1, 1 << 63, 10**30, 0.5, 1e308, float("inf"), float("nan")),
    *("", "a", "..", "../it.tar", "/it.tar", "a\0b", "\ud800", "it.tar", "x" * 5000, [], {}, [[]], [None], {"a": {}}, ["cls"]),
)  # fmt: skip


def _mutated_index(data: bytes, random: Random) -> bytes:
    """Put odd values into a document, or odd numbers into arrays."""
    document, split, arrays = data.partition(SPLIT)
    if random.random() < 0.5:
        with suppress(ValueError, RecursionError):
            return json.dumps(_with_odd(json.loads(document), random)).encode() + split + arrays
    return document + split + _mutated_arrays(arrays, random)


def _mutated_arrays(data: bytes, random: Random) -> bytes:
    """Return an Arrow file with an odd number in a column, with an odd head, or with odd bytes."""
    faults = (pa.ArrowException, OSError, TypeError, LookupError, ValueError, OverflowError)
    if random.random() < 0.7:
        with suppress(*faults):
            return _rewritten(data, random)  # fails for a file that is already damaged
    damaged = bytearray(data.ljust(8, b"\0"))
    at = random.randrange(len(damaged) // 8) * 8
    damaged[at : at + 8] = struct.pack("<q", random.choice(_NUMBERS))
    return bytes(damaged)


def _rewritten(data: bytes, random: Random) -> bytes:
    """Return an intact Arrow file with an odd number in a column or with an odd head."""
    reader = pa.ipc.open_file(pa.BufferReader(data))
    batch, metadata = reader.get_batch(0), reader.schema.metadata[b"wdstrain"]
    batch.validate(full=True)
    identity, _, text = metadata.partition(b"\n")
    if random.random() < 0.4 and text.startswith(b"{"):
        with suppress(RecursionError):
            text = json.dumps(_with_odd(json.loads(text), random)).encode()
    else:
        kinds = list(enumerate(batch.schema.types))
        place, kind = random.choice([item for item in kinds if pa.types.is_integer(item[1])])
        values, row = batch.column(place).to_pylist(), random.randrange(batch.num_rows)
        values[row] = random.choice([None, *_NUMBERS])
        batch = batch.set_column(place, batch.schema.names[place], pa.array(values, kind))
        if random.random() < 0.8:
            identity = blake2b(arrow_file(batch), digest_size=8).hexdigest().encode()
    sink = pa.BufferOutputStream()
    schema = batch.schema.with_metadata({b"wdstrain": identity + b"\n" + text})
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
    file_bytes: bytes = sink.getvalue().to_pybytes()
    return file_bytes


_NUMBERS = (-1, 0, 1, 2, 512, 4096, 6000, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63))


def _with_odd(value: Any, random: Random) -> Any:
    """Return the same document with an odd value in one place."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        name = random.choice(sorted(value, key=str))
        if random.random() < 0.1:
            return {key: entry for key, entry in value.items() if key != name}
        return {**value, name: _with_odd(value[name], random)}
    if isinstance(value, list) and value and random.random() < 0.85:
        at = random.randrange(len(value))
        if random.random() < 0.2:
            return value + [value[at]]
        return value[:at] + [_with_odd(value[at], random)] + value[at + 1 :]
    return random.choice(_ODD)


# --- HTTP ---

_OBJECT = b"".join(
    crc32(struct.pack("<I", i)).to_bytes(4, "little") for i in range(512)
)  # each offset has its own bytes
_ADDRESS = "http://server/a.tar"


class _Script(urllib3.connection.HTTPConnection):
    """A connection to a server that sends scripted responses and then closes the connection."""

    answers: Iterator[bytes] = iter(())

    def _new_conn(self) -> socket.socket:
        client_end, server_end = socket.socketpair()
        server_end.sendall(next(_Script.answers, b""))
        server_end.shutdown(socket.SHUT_WR)
        self._theirs = server_end
        return client_end

    def close(self) -> None:
        super().close()
        if hasattr(self, "_theirs"):
            self._theirs.close()


def run_http(data: bytes) -> None:
    """Responses to a request deliver the requested bytes of the object, or a promised error."""
    parts = [_made(*part.partition(b"\n\n")[::2]) for part in data.split(SPLIT)[:6]]
    pool = urllib3.PoolManager(num_pools=1, maxsize=1, timeout=1.0)
    manager = type("Pool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": _Script})
    pool.pool_classes_by_scheme = {"http": manager, "https": manager}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retries, "network_timeout", lambda: 0.005)
        for name in ("_FIRST_PAUSE", "_LONGEST_WAIT"):
            patch.setattr(retries, name, 0.001)
        patch.setattr(http, "_pool_manager", lambda address: pool)
        for size in (len(_OBJECT), None):
            _Script.answers = iter(parts + parts)
            with suppress(WdstrainError), remote.RemoteFile(_ADDRESS, size) as source:
                for offset, length in ((0, 700), (700, 300), (1500, 100), (10, 20)):
                    delivered = source.bytes_at(offset, length)
                    count, meant = len(delivered), _OBJECT[offset : offset + len(delivered)]
                    _must(delivered == meant, "bytes are those of the object", (size, offset))
                    whole = min(length, max(0, source.size - offset))
                    _must(count == whole, "all comes that was asked for", (offset, count))
            pool.clear()
        _Script.answers = iter(parts)
        with suppress(WdstrainError):
            http.read_page("http://server/index.json")
    pool.clear()


def _made(head: bytes, how: bytes) -> bytes:
    """Return a response with this header and the bytes of the object that it claims.

    how: numbers of two bytes each: length, chunks, and end of the body.
    """
    count, chunk, junk = struct.unpack("<HHH", (how + b"\xff" * 6)[:6])
    # an early end of the header would make the rest a body
    head = re.sub(rb"[\r\n]+", b"\n", head).strip(b"\n")
    span = re.search(rb"(?im)^content-range:[ \t]*bytes (\d{1,9})-", head)
    start = int(span[1]) if span and re.match(rb"\S+\s+206\b", head) else 0
    body = _OBJECT[start : start + count]
    length = re.findall(rb"(?im)^content-length:[ \t]*([^\n]*?)[ \t]*$", head)
    is_plain = len(length) == 1 and length[0].isdigit() and len(length[0]) < 9
    is_plain = is_plain and not re.search(rb"\n[ \t]", head)
    if re.search(rb"(?im)^transfer-encoding:[ \t]*chunked[ \t]*$", head):
        step = max(1, chunk % 2000)
        pieces = [body[at : at + step] for at in range(0, len(body), step)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        body += b"0\r\n\r\n" if junk % 3 else b""
    elif is_plain and int(length[0]) <= len(body):
        body = body[: int(length[0])] + b"\xee" * (junk % 1000 if junk < 60_000 else 0)
    return head.replace(b"\n", b"\r\n") + b"\r\n\r\n" + body


def _http_seeds() -> list[bytes]:
    part = b"HTTP/1.1 206 Partial Content\nContent-Length: %d\nContent-Range: bytes %d-2047/2048"
    first = part % (2048, 0) + b'\nETag: "a"'
    others = [
        b"503 Busy\nRetry-After: 1\nContent-Length: 0",
        b"429 Later\nRetry-After: Mon, 01 Jan 2024 00:00:00 GMT\nContent-Length: 0",
        b"302 Found\nLocation: http://server/b.tar\nContent-Length: 0",
        b"200 OK\nTransfer-Encoding: chunked",
        b"200 OK\nContent-Type: text/html\nContent-Length: 9",
        b"200 OK\nContent-Encoding: gzip\nContent-Length: 9",
    ]
    cut = first + b"\n\n" + struct.pack("<H", 300) + SPLIT + part % (1748, 300)
    whole = b"HTTP/1.1 200 OK\nContent-Length: 2048"
    return [whole, first, cut, *(b"HTTP/1.1 " + other + SPLIT + first for other in others)]


_HTTP_WORDS = (
    *(b"HTTP/1.1 ", b"HTTP/1.0 ", b"206", b"200", b"204", b"304", b"307", b"404", b"412", b"416", b"429", b"503", b"100", b"\n\n"),
    *(b"Content-Length: ", b"Content-Range: bytes ", b"Transfer-Encoding: chunked", b"Retry-After: ", b"Location: ", b"ETag: "),
    *(b"Content-Encoding: deflate", b"Connection: close", b"bytes */2048", b"/*", b"-", b"W/", b"\xb2", b"99999999999999999999"),
    *(b"Content-Type: text/html", b"Content-Type: multipart/byteranges", b"9" * 60, b"2048", b"0-2047/2048", b"Mon, 01 Jan 2024"),
    *(b" +9999999999", b"http://server/", b"https://[::1", b"//", b"700-", b"1500-", SPLIT),
)  # fmt: skip


# --- fields ---

_CLASSES = ("cat", "dog", "7", "1_0")


def run_label(data: bytes) -> None:
    """Labels and numbers: the value in the bytes, or a bad sample."""
    text = None if data[:6] == b"\x93NUMPY" else data.decode("utf-8-sig", "replace").strip()
    for name in ("cls", "json.n"):
        for classes in ((), _CLASSES):
            out = np.full((), -1, np.int64)
            if _read(labels.label(name, classes=classes), data, out):
                value = int(out)
                is_class = value >= 0 and (not classes or value < len(classes))
                _must(is_class, "a class is one of them", value)
                if name == "cls" and text is not None:
                    is_named = text in classes and classes.index(text) == value
                    is_number = re.fullmatch(r"[+-]?\d+", text) is not None and int(text) == value
                    _must(is_named or is_number, "a class equals its text", value)
        real = np.full((), -7, np.float32)
        if _read(labels.number(name), data, real) and name == "cls" and text is not None:
            _must("_" not in text, "a number is written as numbers are", text)
            with np.errstate(over="ignore"):
                expected = np.float32(float(text))
            is_same = real == expected if np.isfinite(float(text)) else not np.isfinite(real)
            _must(bool(is_same), "a number is the nearest float32", text)
    many = np.full((len(_CLASSES),), -1, np.float32)
    if _read(labels.label("json.n", classes=_CLASSES, multi=True), data, many):
        _must(set(many.tolist()) <= {0.0, 1.0}, "several classes are ones and zeros", many)


def run_array(data: bytes) -> None:
    """Arrays: numpy's own result for an intact file, never an object, never more memory than bytes."""
    shaped = fields.array("npy", shape=(2, 3), dtype="float32")
    for field in (fields.array("npy"), shaped):
        out = None if field.example is None else np.zeros(field.example.shape, field.example.dtype)
        try:
            read = field.read("npy", memoryview(data), out, _DRAWS)
        except MemoryError:
            raise
        except Exception:
            continue
        value: Any = read if out is None else out
        is_small = not value.dtype.hasobject and value.nbytes <= len(data)
        _must(is_small, "an array has no more bytes than its file", value.dtype)
        expected = np.load(io.BytesIO(data), allow_pickle=False)
        pairs = [(array.dtype, array.shape, array.tobytes()) for array in (expected, value)]
        _must(pairs[0] == pairs[1], "an array equals that of numpy", [pair[:2] for pair in pairs])


def _read(field: Field, data: bytes, out: np.ndarray[Any, Any]) -> bool:
    """Return whether a field can be read. MemoryError is a find, though the decoder would catch
    it.
    """
    try:
        field.read(field.names[0], memoryview(data), out, _DRAWS)
    except MemoryError:
        raise
    except Exception:
        return False
    return True


def _label_seeds() -> list[bytes]:
    texts = [b"3", b" 12\n", b"cat", b"7", b"-1", b"1e3", b"nan", b"-0.5", b"1_0", b"9" * 30]
    texts += [b"\xef\xbb\xbf2", "\u0663".encode()]
    values = b'3|"dog"|[]|["cat", "7"]|1.0|1e400|null|true|{}'.split(b"|")
    rows = [b'{"n": %b}' % value for value in values]
    return texts + rows + [_npy(np.array(3)), _npy(np.array([1.5]))]


def _array_seeds() -> list[bytes]:
    ones = np.ones((2, 3), "f4")
    kinds = ("f4", ">i2", "c16", "?", "u1")
    arrays: list[Any] = [np.arange(6).astype(kind).reshape(2, 3) for kind in kinds]
    arrays += [np.asfortranarray(ones), np.array(["a", "bc"]), np.zeros((0, 7)), np.array(1.0)]
    arrays += [np.zeros(2, [("a", "i4"), ("b", "S3")]), np.zeros(2, "M8[s]")]
    return [*map(_npy, arrays), _npy(ones, version=(2, 0)), _npy(ones[0], version=(3, 0))]


def _npy(value: np.ndarray[Any, Any], version: tuple[int, int] = (1, 0)) -> bytes:
    buffer = io.BytesIO()
    writing: Any = np.lib.format
    writing.write_array(buffer, value, version=version)
    return buffer.getvalue()


_ARRAY_WORDS = (
    *(b"'descr': ", b"'fortran_order': ", b"'shape': ", b"True", b"False", b"'<f4'", b"'|O'", b"'>c16'", b"(", b")", b",", b"()", b"-1"),
    *(b"\x93NUMPY\x01\x00", b"\x93NUMPY\x02\x00", b"\x93NUMPY\x03\x00", b"4611686018427387904", b"[('a', '<i4')]", b"'<U1000000000'", b"'V'"),
)  # fmt: skip


# --- images ---


def run_image(data: bytes) -> None:
    """An image: pixels, or a bad sample; as a mask, class numbers. Its fields resize a region, alone and as a row of a
    batch.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(codecs, "MAX_PIXELS", MOST_PIXELS)
        warnings.simplefilter("ignore")  # Pillow warns of unusual tags
        pixels_ = None
        with suppress(SampleError):
            pixels_ = decode_image(data)
            is_rgb = pixels_.dtype == np.uint8 and pixels_.ndim == 3 and pixels_.shape[2] == 3
            _must(is_rgb and 0 < pixels_.size <= 3 * MOST_PIXELS, "pixels", pixels_.shape)
        with suppress(SampleError):
            numbers = codecs.decode_mask(data)
            is_whole = numbers.ndim == 2 and numbers.dtype.kind in "iu"
            _must(is_whole and 0 < numbers.size <= MOST_PIXELS, "class numbers", numbers.shape)
        draws = uniform(np.array([zlib.crc32(data)]), 27, "fuzz")
        for field in (fields.image(size=(8, 6), augment="rrc+flip"), fields.image(size=16)):
            _compare_image_field(field, data, pixels_, draws)


def _compare_image_field(field: fields.Image, data: bytes, whole: Any, draws: Any) -> None:
    """Check that the field's pixels equal the resized full image, and those of a row of a batch."""
    assert field.example is not None
    alone, batch = (np.zeros((1, *field.example.shape), np.uint8) for _ in range(2))
    is_read = False
    with suppress(SampleError):
        field.read("jpg", memoryview(data), alone[0], draws[0])
        is_read = True
    source = np.frombuffer(data, np.uint8)
    place = np.array([source.ctypes.data]), np.array([len(source)])
    in_batch = bool(data and field.read_rows(np.array([0]), *place, batch, draws))
    _must(is_read or not in_batch, "an image that decodes in a batch decodes alone", field)
    _must(not in_batch or np.array_equal(alone, batch), "a row of a batch is the same", field)
    if whole is None:  # damage of a JPEG may be below the region
        is_jpeg = data[:2] == b"\xff\xd8"
        _must(not is_read or is_jpeg, "data that is not an image gives no value", field)
        return
    _must(is_read, "a picture makes a value", field)
    assert field.size is not None
    height, width = whole.shape[:2]
    top, left, h, w = region(height, width, field.size, field.augment, draws[0])
    expected = np.zeros_like(alone[0])
    resize(whole[top : top + h, left : left + w], expected)
    mirrored = field.augment.flip and draws[0, FLIP_DRAW] < 0.5
    expected = expected[:, ::-1] if mirrored else expected
    _must(np.array_equal(alone[0], expected), "a value is the resized region of the whole", field)


def _image_seeds() -> list[bytes]:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    return [*(path.read_bytes() for path in sorted(_IMAGES.iterdir())), script]


_IMAGE_WORDS = (
    *(b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xc0", b"\xff\xc2", b"\xff\xc4", b"\xff\xdb", b"\xff\xdd", b"\xff\xe1", b"\xff\xd0"),
    *(b"Exif\0\0", b"IHDR", b"IDAT", b"IEND", b"PLTE", b"tRNS", b"acTL", b"GIF89a", b"RIFF", b"WEBPVP8 ", b"VP8L", b"VP8X", b"II*\0"),
    *(b"tiff:Orientation", b"http://ns.adobe.com/xap/1.0/\0", b"\x12\x01\x03\0\x01\0\0\0", b"\x01\x12\0\x03\0\0\0\x01", b"MM\0*", b"BM", b"P6\n", b"P5\n", b"%!PS", b"MPF\0"),
)  # fmt: skip


# --- helpers ---

_DRAWS = uniform(np.array([0]), 27, "fuzz")[0]


def _must(holds: bool, promise: str, seen: Any) -> None:
    if not holds:
        raise Broken(f"{promise}: {str(seen)[:500]}")


def _reading(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


@cache
def _folder() -> str:
    """A folder of this process, in memory if possible."""
    place = tempfile.TemporaryDirectory(
        prefix="fuzzing-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    )
    _FOLDERS.append(place)
    os.environ["XDG_CACHE_HOME"] = os.path.join(place.name, "cache")
    return place.name


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends

_TAR_WORDS = (b"ustar\0", b"ustar  \0", b" path=", b" size=")
TARGETS = {
    target.name: target
    for target in (
        Target("tar", run_tar, _tar_seeds, _TAR_WORDS, _mutated_tar),
        Target("salvage", run_salvage, _tar_seeds, (), _mutated_tar),
        Target("rescue", run_rescue, lambda: _tar_seeds()[:1], (), _mutated_tar),
        Target("index", run_index, _index_seeds, (SPLIT,), _mutated_index),
        Target("part", run_part, _part_seeds, (), _mutated_arrays),
        Target("http", run_http, _http_seeds, _HTTP_WORDS, None, 4096),
        Target("label", run_label, _label_seeds, (b'{"n": ',), None, 512),
        Target("array", run_array, _array_seeds, _ARRAY_WORDS, None, 2048),
        Target("image", run_image, _image_seeds, _IMAGE_WORDS, None, 8192),
    )
}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz.targets TARGET FILE\ntargets: {', '.join(TARGETS)}")
    with open(sys.argv[2], "rb") as file:
        TARGETS[sys.argv[1]].run(file.read())
    print("it holds")


if __name__ == "__main__":
    main()
