"""The files of expected values, the message of a test that finds another value, and tiny images.

A file is a JSON object with an entry per name, in `expected/`. A test run only reads it.
`tests.golden.rewrite` sets `rewriting`, and the same tests then write their values.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "expected"

# The trailer of a commit that changes each file.
TRAILERS = {
    "orders": "Order: breaking",
    "conversions": "Format: breaking",
    "json_keys": "Format: breaking",
    "checkpoint_keys": "Checkpoint: breaking",
    "images": "Format: breaking",
}

rewriting = False


def check(file: str, name: str, value: Any) -> None:
    """Check that a JSON-able value equals the entry `name` of a file, or write it there."""
    entries = read(file)
    if rewriting:
        write(file, {**entries, name: value})
        return
    assert name in entries, f"{name!r} is missing in {file}.json. Add it: {command(file)}"
    expected = entries[name]
    assert value == expected, f"{name!r} changed: {difference(expected, value)}\n{advice(file)}"


def check_close(file: str, name: str, value: list[float], tolerance: float) -> None:
    """Check that each number differs from that of the entry `name` by at most `tolerance`."""
    expected = read(file).get(name, [])
    if not rewriting and len(expected) == len(value):
        pairs = enumerate(zip(expected, value, strict=True))
        far = [(i, pair) for i, pair in pairs if not abs(pair[0] - pair[1]) <= tolerance]
        assert not far, (
            f"{name!r} changed by more than {tolerance}: number {far[0][0]} was {far[0][1][0]}, is "
            f"{far[0][1][1]}\n{advice(file)}"
        )
        return
    check(file, name, value)


def check_names(file: str, names: Iterable[str]) -> None:
    """Check that a file has these entries and no other, or delete the others."""
    names, entries = list(names), read(file)
    if rewriting:
        write(file, {name: value for name, value in entries.items() if name in names})
        return
    assert sorted(entries) == sorted(names), f"{file}.json has other entries. Run: {command(file)}"


def advice(file: str) -> str:
    """Return what the author of a change must do."""
    return (
        f"Users rely on this value. Mend the code, or make the change on purpose: a commit with the "
        f"trailer `{TRAILERS[file]}` and its reason, in which {file}.json is written by: "
        f"{command(file)}"
    )


def command(file: str) -> str:
    return f"python -m tests.golden.rewrite {file}"


def difference(expected: Any, value: Any) -> str:
    """Return what differs, briefly: entries of an object or a list by themselves."""
    if isinstance(expected, dict) and isinstance(value, dict):
        names = [name for name in {**expected, **value} if expected.get(name) != value.get(name)]
        return "; ".join(f"{name}: {expected.get(name)!r} -> {value.get(name)!r}" for name in names)
    if isinstance(expected, list) and isinstance(value, list):
        gone = [item for item in expected if item not in value]
        new = [item for item in value if item not in expected]
        return f"removed {gone}, added {new}" if gone or new else f"was {expected}, is {value}"
    return f"was {expected!r}, is {value!r}"


def digest(data: bytes | str) -> str:
    """Return the sha256 of bytes or text, cut to 128 bits."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:32]


def key_paths(value: Any, data: Collection[str] = ()) -> list[str]:
    """Return the paths of the keys of nested values, with the types of the leaves, sorted.

    {"a": {"b": 1}, "c": [{"d": "x"}]} gives ["a.b: int", "c[].d: str"]. Items of a list share a
    path. Tensors have their dtype and shape. data: names of objects whose keys are shown as "*".
    """
    return sorted(set(_paths(value, "", data)))


def _paths(value: Any, path: str, data: Collection[str]) -> list[str]:
    if isinstance(value, Mapping) and value:
        is_data = path.rpartition(".")[2] in data
        prefix = f"{path}." if path else ""
        return [
            line
            for name, item in value.items()
            for line in _paths(item, f"{prefix}{'*' if is_data else name}", data)
        ]
    if isinstance(value, (list, tuple)) and value:
        return [line for item in value for line in _paths(item, f"{path}[]", data)]
    if isinstance(value, torch.Tensor):
        return [f"{path}: {value.dtype}{list(value.shape)}"]
    return [f"{path}: {type(value).__name__}"]


def read(file: str) -> dict[str, Any]:
    path = FOLDER / f"{file}.json"
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return entries


def write(file: str, entries: Mapping[str, Any]) -> None:
    text = ",\n".join(f" {_json(name)}: {_lines(value)}" for name, value in entries.items())
    (FOLDER / f"{file}.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    """Return JSON with a line for each item, for a value whose items are compared one by one."""
    if isinstance(value, dict) and value:
        rows = [f"{_json(name)}: {_json(item)}" for name, item in value.items()]
        return "{\n  " + ",\n  ".join(rows) + "\n }"
    if isinstance(value, list) and len(value) > 3 and isinstance(value[0], str):
        return "[\n  " + ",\n  ".join(map(_json, value)) + "\n ]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def png(number: int, width: int = 6, height: int = 5, *, gray: bool = False) -> bytes:
    """Return a PNG whose pixels depend on a number: RGB, or gray class numbers 0 to 3.

    Its data are not compressed, because the output of zlib differs between its versions.
    """
    rows = b""
    for y in range(height):
        places = [(x, channel) for x in range(width) for channel in range(1 if gray else 3)]
        rows += b"\0" + bytes(
            (number + x + y) % 4 if gray else (17 * number + 5 * x + 3 * y + 90 * channel) % 256
            for x, channel in places
        )
    size = len(rows).to_bytes(2, "little") + (len(rows) ^ 0xFFFF).to_bytes(2, "little")
    stored = b"\x78\x01\x01" + size + rows + zlib.adler32(rows).to_bytes(4, "big")
    head = (
        width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2 * (not gray), 0, 0, 0])
    )
    chunks = [b"IHDR" + head, b"IDAT" + stored, b"IEND"]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
        for chunk in chunks
    )
