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
from tests.support.tables import attempt, read_members, write_images, write_table

IMAGES, KINDS = 14, "abc"
MOST_MOMENTS = 60


def write_version(path: Path, form: str, numbers: list[int]) -> None:
    """Replace a table, or append rows to it if it only grows. Row `n` has image, class and id n."""
    columns: dict[str, list[Any]] = {
        "file": [f"{n}.png" for n in numbers],
        "kind": [KINDS[n % 3] for n in numbers],
        "id": numbers,
    }
    if form == "parquet":
        columns["file"] = [picture(n, size=(4, 4)) for n in numbers]
    written = write_table(path.with_name("new"), form, **columns)
    new = written.read_bytes()
    if path.exists() and new.startswith(path.read_bytes()):
        with open(path, "ab") as file:  # as a program does that still records
            file.write(new[path.stat().st_size :])
    else:
        os.replace(written, path)


class Changing:
    """Convert a table that changes at a chosen moment: when it is opened, or at a progress call."""

    def __init__(self, folder: Path, form: str, later: list[int], at: int) -> None:
        self._path, self._form, self._later, self._at = folder / f"t.{form}", form, later, at
        self._out, self.moments, self._writes = folder / "out", 0, False
        self._path.unlink(missing_ok=True)
        write_version(self._path, form, list(range(12)))

    def convert(self) -> wt.Index | str:
        with pytest.MonkeyPatch.context() as patch:
            for module in (builtins, os):
                patch.setattr(module, "open", self._watched(module.open))
            options: dict[str, Any] = {"image": "file", "label": "kind", "overwrite": True}
            options |= {"num_workers": 1, "progress": self._moment}
            return attempt(lambda: wt.convert_table(self._path, self._out, **options))

    def check(self, result: wt.Index | str) -> None:
        """Check that the samples are those of one version, or that an error names the table."""
        if isinstance(result, str):
            assert self._path.name in result
            return
        members = read_members(self._out)
        numbers = []
        for name in members:
            key, field = name.split(".")
            if field == "json":
                number = json.loads(members[name])["id"]
                label = result.labels[0].classes[int(members[f"{key}.cls"])]
                assert members[f"{key}.png"] == picture(number, size=(4, 4))
                assert label == KINDS[number % 3]
                numbers.append(number)
        assert sorted(numbers) in (list(range(12)), sorted(self._later))

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            if not self._writes and str(path).endswith(self._path.name):
                self._moment()
            return original(path, *arguments, **named)

        return call

    def _moment(self, *_: object) -> None:
        self.moments += 1
        if self.moments == self._at:
            self._writes = True
            write_version(self._path, self._form, self._later)
            self._writes = False


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    "later",
    [list(range(14)), list(range(11, -1, -1)), list(range(8))],
    ids=["grown", "in another order", "shorter"],
)
def test_a_table_that_changes_at_any_moment_is_packed_in_one_version_or_named(
    tmp_path: Path, form: str, later: list[int]
) -> None:
    write_images(tmp_path, IMAGES)
    for at in range(1, MOST_MOMENTS):
        changing = Changing(tmp_path, form, later, at)
        result = changing.convert()
        changing.check(result)
        if changing.moments < at:
            return
    pytest.fail("the table is read too often")
