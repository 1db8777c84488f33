"""Compiled code and Python code give the same checksums and batches."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wdstrain as wt
from tests.conftest import ROOT, picture
from wdstrain.memory import Memory, checksums
from wdstrain.native import kernels


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 3000)), max_size=40))
def test_checksums_are_those_of_zlib(runs: list[tuple[int, int]]) -> None:
    memory = Memory(8000)
    memory.view[:] = np.random.default_rng(0).bytes(8000)
    start, size = ints(*(a for a, _ in runs)), ints(*(b for _, b in runs))
    expected = [zlib.crc32(memory.view[a : a + b]) for a, b in runs]
    assert checksums(memory, start, size).tolist() == expected
    assert checksums(memory, start[::-1], size[::-1]).tolist() == expected[::-1]


@pytest.mark.parametrize(
    ("start", "size"), [(-1, 5), (0, -1), (96, 5), ((1 << 63) - 1,) * 2, (1, -1 << 63)]
)
def test_runs_outside_the_memory_are_refused(start: int, size: int) -> None:
    """Offsets come from an index and become addresses, so they are validated."""
    with pytest.raises(ValueError, match="beyond its memory"):
        checksums(Memory(100), ints(0, start), ints(1, size))


def without_library(*words: object) -> str:
    """Return what Python prints in a process that does not use the compiled library."""
    line, environment = [sys.executable, *map(str, words)], {**os.environ, kernels.DISABLE: "0"}
    done = subprocess.run(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def epochs(folder: Path) -> list[Any]:
    """Return the batches and bad samples of each set, read in three ways."""
    array = {"x": wt.array("x.npy", shape=(40, 40), dtype="uint8")}
    fields = {**array, "image": wt.image(size=16), "label": wt.label()}
    options: dict[str, Any] = {"batch_size": 7, "on_error": "replace", "max_errors": 1.0}
    made = []
    for name in ("sound", "damaged", "short"):
        for chosen in (fields, array, None):
            with wt.Loader(folder / name, chosen, **options) as loader:
                batches = [
                    {
                        key: str(getattr(value, "tolist", lambda v=value: v)())
                        for key, value in b.items()
                    }
                    for b in loader
                ]
            made.append([batches, loader.report()["bad"], loader.report()["bad_reasons"]])
    return made


EPOCHS = """
import json, sys
from pathlib import Path
from tests.memory.test_native import epochs
print(json.dumps(epochs(Path(sys.argv[1]))))
"""


def test_a_loader_delivers_equal_batches_without_the_library(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(0, 255, (60, 40, 40), np.uint8)
    for name in ("sound", "damaged", "short"):
        samples = (
            {"__key__": f"k{i:03d}", "x.npy": values[i], "jpg": picture(i), "cls": i % 7}
            for i in range(60)
        )
        wt.pack(samples, str(tmp_path / name), shuffle=False, max_shard_samples=20)
        shard = tmp_path / name / "train-000001.tar"
        data = bytearray(shard.read_bytes())
        for at in range(5000, len(data), 1997):
            data[at] ^= name == "damaged"
        shard.write_bytes(data[: len(data) // 2 if name == "short" else None])
    output = epochs(tmp_path)
    assert json.loads(without_library("-c", EPOCHS, tmp_path)) == output
    assert [bad > 0 for _, bad, _ in output] == [False] * 3 + [True] * 6


@pytest.mark.slow
def test_the_generic_code_passes_the_tests_of_the_compiled_code(tmp_path: Path) -> None:
    files = ["tests/memory/test_native.py", "tests/reader/test_checksums.py"]
    base = f"--basetemp={tmp_path / 'tests'}"
    without_library("-m", "pytest", base, "-m", "not slow and not alone", *files)


def test_a_library_of_another_source_is_not_used(tmp_path: Path) -> None:
    """An updated checkout may have a library built from older sources, with other signatures."""
    if kernels.library is None:
        pytest.skip("there was no C compiler")
    assert kernels.load_library() is not None
    (tmp_path / "kernels.c").write_text(Path(kernels.SOURCE).read_text() + "\n")
    assert kernels.load_library(source=str(tmp_path / "kernels.c")) is None


@pytest.mark.parametrize(
    ("compiler", "why"), [("/nowhere/cc", "no C compiler was found"), ("false", "false failed")]
)
def test_without_a_compiler_the_build_logs_it_and_compiles_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, why: str
) -> None:
    (tmp_path / "lib.so").write_bytes(b"of before")
    monkeypatch.setenv("CC", compiler)
    script = runpy.run_path(str(ROOT / "scripts" / "compile.py"))
    printed = script["compile_library"](Path(kernels.SOURCE), tmp_path / "lib.so")
    assert printed.startswith(why)
    assert os.listdir(tmp_path) == []
