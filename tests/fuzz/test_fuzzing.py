"""Unexpected bytes end in a value or a promised error: kept cases, properties, short fuzzing
runs.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from tests.conftest import encoded, npy, quick_and_slow
from tests.fuzz import __main__ as fuzzing
from tests.fuzz import mutated_tars, targets
from tests.fuzz.tar_mutations import KINDS, summed
from tests.fuzz.targets import TARGETS
from wdstrain.decode import codecs, fields, labels
from wdstrain.errors import ShardError
from wdstrain.shards import index_io, tar
from wdstrain.shards.tar import samples
from wdstrain.shards.tar_headers import header, padding
from wdstrain.storage import http

CASES = sorted(fuzzing.CASES.glob("*/*"))

how: dict[str, Any] = {"derandomize": True, "deadline": None, "database": None}
some = settings(max_examples=60, suppress_health_check=list(HealthCheck), **how)
seeds = st.integers(0, 1 << 32)


# --- kept cases and seeds ---


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_kept_case_passes(case: Path) -> None:
    TARGETS[case.parent.name].run(case.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_of_a_fuzzer_pass_and_are_within_its_size_limit(name: str) -> None:
    target = TARGETS[name]
    for data in target.seeds():
        assert len(data) <= target.longest
        target.run(data)


@pytest.mark.parametrize(
    ("module", "name", "fault", "case"),
    [
        (tar, "EXTENSIONS", b"xgLK", "tar/solaris-extension-header"),
        (index_io, "_lies_in", lambda at, *_: at == at, "part/member-outside-its-sample"),
        (http, "_RANGE", re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)"), "http/range-of-5000-digits"),
        (labels, "number_of", lambda x: float(x), "label/name-that-python-takes-for-a-number"),
    ],
)
def test_a_target_detects_a_planted_fault(
    module: ModuleType, name: str, fault: object, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, fault)
    with pytest.raises((targets.Broken, ValueError)):
        TARGETS[case.split("/")[0]].run((fuzzing.CASES / case).read_bytes())


@pytest.mark.parametrize("record", [b"18 path=b/all.txt\n", b"9 size=1\n"])
def test_one_path_or_size_for_all_members_is_refused(record: bytes) -> None:
    first = header("g", len(record))
    first = summed(first[:156] + b"g" + first[157:])
    data = first + record + bytes(padding(len(record))) + targets.tar_of([("a", {"txt": b"1"})])
    with pytest.raises(ShardError, match="for all its members at offset 0"):
        list(samples(part_of(data), len(data), "it.tar"))


def part_of(data: bytes) -> Callable[[int, int], bytes]:
    """Return a function that reads these bytes from an offset on."""
    return lambda offset, length: data[offset : offset + length]


# --- properties ---

_letters = st.characters(exclude_characters="\0/.", exclude_categories=["Cs"])
_names = st.lists(st.text(_letters, min_size=1, max_size=120), min_size=1, max_size=3)
_keys = _names.map("/".join).filter(lambda key: key[0] not in "_")
_fields = st.sampled_from(["cls", "txt", "seg.png", "json", "x" * 90])
_parts = st.dictionaries(_fields, st.binary(max_size=1100), min_size=1)


@some
@given(st.dictionaries(_keys, _parts, max_size=5))
def test_any_written_names_and_sizes_are_read_back(written: dict[str, dict[str, bytes]]) -> None:
    data = targets.tar_of(list(written.items()))
    targets.run_tar(data)
    read = part_of(data)
    found = samples(read, len(data), "it")
    parts = {key: {name: read(m.offset, m.size) for name, m in of.items()} for key, of in found}
    assert parts == written


@some
@given(seeds, st.sampled_from([*KINDS.values()]), st.sampled_from([0, 1, 3, 4, 5]))
def test_a_damaged_tar_is_read_correctly_or_refused_and_repaired_to_intact_samples(
    seed: int, kind: Any, number: int
) -> None:
    damaged = kind(TARGETS["tar"].seeds()[number], Random(seed))
    targets.run_tar(damaged)
    targets.run_salvage(damaged)
    targets.run_rescue(kind(TARGETS["rescue"].seeds()[0], Random(seed)))


@some
@given(seeds)
def test_odd_values_in_an_index_never_point_outside_its_shards(seed: int) -> None:
    random = Random(seed)
    for name in ("index", "part"):
        target = TARGETS[name]
        data = target.seeds()[0]
        assert target.mutate is not None
        for _ in range(random.choice([1, 2])):
            data = target.mutate(data, random)
        target.run(data)


_sizes = st.integers(0, 2100)
_answer = st.tuples(st.sampled_from([200, 206, 206, 503]), *[_sizes] * 4, st.booleans())


@some
@given(st.lists(_answer, min_size=1, max_size=3))
def test_contradictory_response_headers_deliver_no_wrong_bytes(answers: list[Any]) -> None:
    parts = []
    for status, first, last, length, count, chunked in answers:
        head = f"HTTP/1.1 {status} So\nContent-Range: bytes {first}-{last}/2048\n"
        head += "Transfer-Encoding: chunked" if chunked else f"Content-Length: {length}"
        parts.append(head.encode() + b"\n\n" + struct.pack("<HHH", count, length, last))
    targets.run_http(targets.SPLIT.join(parts))


@some
@given(st.one_of(st.text(max_size=20), st.integers().map(str), st.floats().map(repr)))
def test_a_label_or_number_equals_its_text(text: str) -> None:
    targets.run_label(text.encode("utf-8", "surrogatepass"))


@some
@given(st.floats(allow_nan=False, width=32))
def test_a_number_of_32_bits_is_read_exactly(value: float) -> None:
    out = np.zeros((), np.float32)
    labels.number("n").read("n", memoryview(repr(value).encode()), out, np.zeros(27))
    assert out == np.float32(value)


_documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
)


@some
@given(_documents)
def test_a_document_round_trips(value: Any) -> None:
    data = json.dumps(value).encode()
    assert fields.json().read("json", memoryview(data), None, np.zeros(27)) == value


@some
@given(
    arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)
def test_an_array_of_any_kind_round_trips_or_is_a_bad_sample(value: Any) -> None:
    targets.run_array(npy(value))


@some
@given(
    st.integers(1, 40), st.integers(1, 40), seeds, st.sampled_from(["PNG", "BMP", "TIFF", "PPM"])
)
def test_pixels_of_any_shape_round_trip_in_lossless_formats(
    height: int, width: int, seed: int, kind: str
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = encoded(Image.fromarray(pixels), kind)
    targets.run_image(image)
    assert np.array_equal(codecs.decode_image(image), pixels)


@some
@given(seeds)
def test_an_image_with_flipped_bits_is_decoded_equally_or_refused(seed: int) -> None:
    random = Random(seed)
    data = bytearray(random.choice(TARGETS["image"].seeds()))
    for _ in range(random.choice([1, 3])):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    targets.run_image(bytes(data))


# --- runs ---


RUNS = {"tar": 3000, "salvage": 2000, "index": 300, "part": 5000, "http": 300, "label": 5000}
RUNS |= {"array": 3000, "image": 500}


@pytest.mark.parametrize(("name", "runs"), quick_and_slow(RUNS.items(), 1))
def test_a_short_run_of_the_fuzzer_has_no_finds(name: str, runs: int, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86-64 alone")
    outcome = fuzzing.fuzz(TARGETS[name], tmp_path, seed=1, limits=[f"-runs={runs}"])
    assert outcome.finds == []
    assert outcome.executions >= runs
    assert outcome.edges > 50


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # files of webdataset
@pytest.mark.parametrize("count", [290, pytest.param(1160, marks=pytest.mark.slow)])
def test_no_mutated_tar_loses_a_sample_silently_unlike_with_tarfile(
    count: int, tmp_path: Path
) -> None:
    counts, broken = mutated_tars.campaign(count, seed=count, folder=tmp_path)
    assert broken == []
    assert counts["indexed", "another", "error"] > 0
    for reader in ("tarfile", "webdataset"):
        assert counts[reader, "tells", "silent"] > count // 10
        assert counts[reader, "harmless", "whole"] > 0
