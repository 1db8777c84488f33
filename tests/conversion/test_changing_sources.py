"""Sources that change while they are converted: one version is packed, or an error says so."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import picture
from tests.support.tables import attempt, read_samples, write_images, write_table

KINDS = "abc"
FORMER = list(range(12))


def write_version(path: Path, form: str, numbers: list[int]) -> None:
    """Replace a table, or append rows to it if it only grows. Row `n` has image, class and id n."""
    columns: dict[str, list[Any]] = {"file": [f"{n}.png" for n in numbers], "id": numbers}
    columns["kind"] = [KINDS[n % 3] for n in numbers]
    if form == "parquet":
        columns["file"] = [picture(n, size=(4, 4)) for n in numbers]
    written = write_table(path.with_name("new"), form, **columns)
    new = written.read_bytes()
    if path.exists() and new.startswith(path.read_bytes()):
        with open(path, "ab") as file:  # as a program does that still records
            file.write(new[path.stat().st_size :])
    else:
        os.replace(written, path)


def converted(path: Path, form: str, later: list[int], at: int) -> tuple[wt.Index | str, int]:
    """Convert a table that changes when it is opened, or at a progress call.

    at: number of this moment. Returns the result, and the number of moments.
    """
    moments, writes = 0, False

    def moment(*_: object) -> None:
        nonlocal moments, writes
        moments += 1
        if moments == at:
            writes = True
            write_version(path, form, later)
            writes = False

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(opened: Any, *arguments: Any, **named: Any) -> Any:
            if not writes and str(opened).endswith(path.name):
                moment()
            return original(opened, *arguments, **named)

        return call

    path.unlink(missing_ok=True)
    write_version(path, form, FORMER)
    options: dict[str, Any] = {"overwrite": True, "num_workers": 1, "progress": moment}
    with pytest.MonkeyPatch.context() as patch:
        for module in (builtins, os):
            patch.setattr(module, "open", watched(module.open))
        out = path.parent / "out"
        result = attempt(lambda: wt.convert_table(path, out, image="file", label="kind", **options))
    return result, moments


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    "later", [list(range(14)), FORMER[::-1], FORMER[:8]], ids=["grown", "reversed", "shorter"]
)
def test_a_table_that_changes_at_any_moment_is_packed_in_one_version_or_named(
    tmp_path: Path, form: str, later: list[int]
) -> None:
    write_images(tmp_path, 14)
    for at in range(1, 60):
        result, moments = converted(tmp_path / f"t.{form}", form, later, at)
        if isinstance(result, str):
            assert f"t.{form}" in result
        else:
            numbers = []
            for fields in read_samples(tmp_path / "out").values():
                number = json.loads(fields["json"])["id"]
                assert fields["png"] == picture(number, size=(4, 4))
                assert result.labels[0].classes[int(fields["cls"])] == KINDS[number % 3]
                numbers.append(number)
            assert sorted(numbers) in (FORMER, sorted(later))
        if moments < at:
            return
    pytest.fail("the table is read too often")
