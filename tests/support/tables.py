"""Tables in every form that `convert_table` reads, and what conversions write."""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pandas
import pyarrow
import pyarrow.parquet

import wdstrain as wt
from tests.conftest import picture, read_with_webdataset
from wdstrain.cli import main

Result = TypeVar("Result")

FORMS = ("csv", "jsonl", "parquet", "frame")


def attempt(convert: Callable[[], Result]) -> Result | str:
    """Return the result of a conversion, or the message of its refusal."""
    try:
        return convert()
    except wt.WdstrainError as error:
        return str(error)


def write_images(folder: Path, count: int) -> Path:
    """Write <folder>/0.png, 1.png, ..., which all differ."""
    return write_pictures(folder, range(count), size=(4, 4))


def write_pictures(folder: Path, numbers: Iterable[int], **options: Any) -> Path:
    """Write <folder>/<number>.png for each number. options: of `picture`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        (folder / f"{number}.png").write_bytes(picture(number, **options))
    return folder


def write_table(path: Path, form: str, **columns: list[Any]) -> Any:
    """Write a table, and return what `convert_table` takes. path: without an extension."""
    if form == "frame":
        return pandas.DataFrame(columns)
    rows = list(zip(*columns.values(), strict=True))
    path = path.with_name(f"{path.name}.{form}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif form == "jsonl":
        lines = (json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")
    else:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(columns), *rows])
    return path


def read_members(out: Path) -> dict[str, bytes]:
    """Return {member name: bytes} of every shard of a folder, by tarfile."""
    members: dict[str, bytes] = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None and member.name not in members  # noqa: PT018
                members[member.name] = file.read()
    return members


def read_samples(out: Path) -> dict[str, dict[str, bytes]]:
    """Return {key: {field: bytes}} of every shard of a folder, by webdataset."""
    return dict(read_with_webdataset(sorted(out.glob("*.tar"))))


def read_json(out: Path) -> list[dict[str, Any]]:
    """Return the json field of every sample of a folder."""
    return [json.loads(data) for name, data in read_members(out).items() if name.endswith(".json")]


class Tables:
    """Converts tables beside IMG/0.png to IMG/11.png, each into a new folder `out`.

    table: text of t.csv, the columns of a table in a form of `FORMS`, or what `convert_table` takes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self._count = folder, folder / "out", 0
        write_pictures(folder / "IMG", range(12))

    def __call__(self, table: Any, form: str = "csv", **options: Any) -> wt.Index:
        """Convert a table whose images are in the column `file`."""
        table = self.write(table, form)
        if isinstance(table, pandas.DataFrame):
            options = {"root": self.folder, **options}
        return self.convert(table, **options)

    def convert(self, table: Any, **options: Any) -> wt.Index:
        """Convert a table as it is given."""
        self._count += 1
        self.out = self.folder / f"out{self._count}"
        return wt.convert_table(table, self.out, **{"image": "file", **options})

    def command(self, table: Any, *words: str) -> int:
        """Convert a table by the command, and return its status."""
        paths = [str(self.write(table)), str(self.out)]
        return main(["convert", "table", *paths, "--image", "file", *words])

    def write(self, table: Any, form: str = "csv") -> Any:
        if isinstance(table, dict):
            return write_table(self.folder / "t", form, **table)
        if not isinstance(table, str) or "\n" not in table:
            return table
        (self.folder / "t.csv").write_text(table, encoding="utf-8")
        return self.folder / "t.csv"

    @property
    def samples(self) -> dict[str, dict[str, bytes]]:
        return read_samples(self.out)

    @property
    def skipped(self) -> dict[int, str]:
        """{row: reason} of the samples that the conversion skipped."""
        path = self.out / "skipped.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {row["row"]: row["reason"] for row in map(json.loads, lines)}

    def entries(self, name: str) -> dict[str, Any]:
        """Return {key: the json entry `name`}."""
        return {key: json.loads(fields["json"])[name] for key, fields in self.samples.items()}


def labelled(cells: list[Any]) -> dict[str, list[Any]]:
    """Return columns of a table with an image and a cell of `y` in each row."""
    return {"file": [f"IMG/{n % 12}.png" for n in range(len(cells))], "y": cells}


def pictured(cells: list[Any], name: str = "y") -> pandas.DataFrame:
    """Return a table with an encoded image and a cell in each row."""
    images = [picture(n, size=(4, 4)) for n in range(len(cells))]
    return pandas.DataFrame({"image": images, name: pandas.Series(cells, dtype=object)})
