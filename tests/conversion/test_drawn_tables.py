"""Random tables, packed and compared with an independent model of the expected shards."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pandas
import pytest

import wdstrain as wt
from tests.conftest import picture, read_with_webdataset
from tests.support.drawn_cases import check_block
from tests.support.tables import write_table

_TEXTS = ["", "x", 'a "q" b', "two\nlines", "a,b;c\td", "Ünï ☃", "'", "n" * 3000, "007", "1e5x"]
_TEXTS += ["NA", "[1]", "{}", "a|b", "\\n"]
_ODD = {
    "number": ["NA", "nan", "abc", "", "inf", "-", "None"],
    "whole": ["NA", "nan", "abc", "", "x1"],
    "truth": ["maybe", ""],
    "words": ["", " "],
    "several": ["", " "],
}


class Case:
    """A random table with the expected fate of each row: expected has those that are packed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.folder = random.Random(seed), folder
        draw = self.draw
        self.form = draw.choice(["csv", "csv", "tsv", "jsonl", "parquet", "frame", "bytes"])
        self.kind = draw.choice(list(_ODD))
        self.declared = self.kind == "several" or draw.random() < 0.4
        self.count = draw.randrange(25, 60)
        self.paths = draw.choice(["plain", "backslash", "absolute", "dots"])
        self.names = [self._name(n) for n in range(draw.randrange(self.count // 2, self.count))]
        self.pictures = {name: picture(n) for n, name in enumerate(self.names)}
        for name, data in self.pictures.items():
            (folder / "set" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "set" / name).write_bytes(data)
            # The same name, nearer to the root.
            (folder / "set" / Path(name).name).write_bytes(b"not this")
        self.rows: list[dict[str, Any]] = []
        self.expected: dict[int, tuple[bytes, Any, str | None]] = {}
        self._fill()

    def _name(self, number: int) -> str:
        folders = self.draw.choice(["a", "a/b", "c d", "ü"])
        return f"{folders}/{number}{self.draw.choice(['', '.x', ' y', ',z'])}.png"

    def _cell(self, name: str) -> str:
        if self.paths == "backslash":
            return name.replace("/", "\\")
        if self.paths == "absolute":
            return f"{self.folder}/set/{name}"
        return self.draw.choice(["./", "a/../", ""]) + name if self.paths == "dots" else name

    def _label(self) -> tuple[Any, Any]:
        """(cell, delivered value)"""
        draw = self.draw
        if self.kind == "number":
            special = [1e-100, -0.0, 2.5e7]
            values = [draw.uniform(-5, 5), draw.randrange(-3, 9), draw.choice(special)]
            value = draw.choice(values)
            value = value if self.rows else 0.5  # a fraction at least
            return (repr(value) if self.form in ("csv", "tsv") else value), float(value)
        if self.kind == "whole":
            number = draw.randrange(7)
            return (str(number) if self.form in ("csv", "tsv") else number), str(number)
        if self.kind == "truth":
            truth = draw.random() < 0.5
            if self.form not in ("csv", "tsv"):
                return truth, str(truth)
            return draw.choice([str(truth), str(truth).lower()]), str(truth)
        if self.kind == "words":
            word = draw.choice(["cat", "dog", "Ünï", "a b", "none", "7th"])
            return draw.choice(["", " "]) + word + draw.choice(["", "  "]), word
        several = draw.sample(["sun", "sea", "sand"], draw.randrange(1, 4))
        return " | ".join(several), sorted(several)

    def _fill(self) -> None:
        draw = self.draw
        # At most one odd label: a short column with more may have two meanings.
        wrong = draw.randrange(2)
        wrong_at = draw.randrange(1, self.count) if wrong else -1
        for number in range(self.count):
            name = draw.choice(self.names)
            cell, value = self._label()
            path, missing = self._cell(name), draw.random() < 0.05 and number > 2
            if missing:
                path = self._cell(f"a/gone{number}.png")
            if number == wrong_at and not (self.form == "parquet" and self.kind != "words"):
                cell, value = draw.choice(_ODD[self.kind]), None
                if self.form in ("jsonl", "frame", "bytes") and cell == "" and draw.random() < 0.5:
                    cell = None
            text = draw.choice(_TEXTS)
            row = {"id": f"id{number}", "file": path, "y": cell, "text": text}
            row["part"] = draw.choice(["train", "val"])
            if self.form == "bytes":
                row["file"], missing = self.pictures[name], False
            self.rows.append(row)
            if not missing and value is not None:
                kept = None if self.form in ("csv", "tsv") and not text.strip() else text
                self.expected[number] = (self.pictures[name], value, kept)

    def write(self) -> Any:
        place, columns = self.folder / "set", ["id", "file", "y", "text", "part"]
        if self.form in ("csv", "tsv"):
            encoding = self.draw.choice(["utf-8", "utf-8-sig"])
            with open(place / f"t.{self.form}", "w", newline="", encoding=encoding) as file:
                writer = csv.writer(
                    file,
                    delimiter="\t" if self.form == "tsv" else ",",
                    quoting=self.draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
                    lineterminator=self.draw.choice(["\n", "\r\n"]),
                )
                writer.writerows([columns, *([row[name] for name in columns] for row in self.rows)])
            return str(place / f"t.{self.form}")
        cells = {name: [row[name] for row in self.rows] for name in columns}
        if self.form in ("jsonl", "parquet"):
            return str(write_table(place / "t", self.form, **cells))
        return pandas.DataFrame(cells, dtype=object)


def delivered(out: Path, label: Any) -> dict[int, list[tuple[str, bytes, Any, str | None]]]:
    """{row: [(split, image, label, text)]} of every sample in the shards."""
    actual: dict[int, list[tuple[str, bytes, Any, str | None]]] = {}
    for path in sorted(out.glob("*.tar")):
        for _, fields in read_with_webdataset([path]):
            rest = json.loads(fields["json"])
            value: Any = rest.get("y")
            if label.kind in ("class", "flag"):
                value = label.classes[int(fields["cls"])]
            elif label.kind == "multi":
                value = sorted(value)
            row = (path.name.partition("-")[0], fields["png"], value, rest["text"])
            actual.setdefault(int(rest["id"][2:]), []).append(row)
    return actual


def check(folder: Path, seed: int) -> None:
    case = Case(folder, seed)
    draw, table = case.draw, case.write()
    kinds = {"number": "number", "whole": "class", "truth": "flag"}
    kinds |= {"words": "class", "several": "multi"}
    label = f"y:{kinds[case.kind]}" if case.declared else "y"
    odd = next((row["y"] for row in case.rows if row["y"] in _ODD[case.kind]), None)
    if case.declared and kinds[case.kind] == "class" and isinstance(odd, str) and odd.strip():
        label = "y"  # declared as a class, every text is a class
    options: dict[str, Any] = {"on_error": "skip", "shuffle": draw.random() < 0.7}
    options["num_workers"] = draw.choice([1, 1, 2])
    options["max_shard_samples"] = draw.choice([None, 7])
    if case.form == "frame":
        options["root"] = str(folder / "set")
    parted = draw.choice(["", "split", "split_by", "group_by"])
    if parted == "split_by":
        options["split_by"] = "part"
    elif parted:
        options["split"] = {"train": 0.5, "val": 0.5}
        options |= {"group_by": "text"} if parted == "group_by" else {}
    case_name = f"seed {seed}: {case.form}, {case.kind}, {case.paths}, {label}, {options}"
    try:
        index = wt.convert_table(table, folder / "out", image="file", label=label, **options)
    except wt.WdstrainError as error:
        if "gets none of" in str(error):  # a split of a few groups may be empty
            return
        raise AssertionError(case_name) from error
    assert index.labels[0].kind == kinds[case.kind], case_name
    actual = delivered(folder / "out", index.labels[0])
    assert set(actual) == set(case.expected), f"{case_name}: rows"
    assert index.info["skipped"] == case.count - len(case.expected), case_name
    for number, (data, value, text) in case.expected.items():
        ((split, was, label_was, text_was),) = actual[number]
        assert was == data, f"{case_name}: picture of row {number}"
        assert label_was == value, f"{case_name}: label of row {number}"
        assert text_was == (text.lstrip() if text and case.form in ("csv", "tsv") else text), (
            f"{case_name}: text of row {number}"
        )
        assert parted != "split_by" or split == case.rows[number]["part"], case_name
    if parted in ("split", "group_by"):
        mark = 1 if parted == "split" else 3
        places: dict[Any, set[str]] = {}
        for rows in actual.values():
            places.setdefault(rows[0][mark], set()).add(rows[0][0])
        assert all(len(sides) == 1 for group, sides in places.items() if group), (
            f"{case_name}: divided"
        )
    assert len(actual) == len(index), case_name


@pytest.mark.parametrize("seed", range(20))
def test_shards_contain_the_rows_of_a_random_table(tmp_path: Path, seed: int) -> None:
    check(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(2))
def test_shards_contain_the_rows_of_many_random_tables(tmp_path: Path, block: int) -> None:
    check_block(lambda seed, folder: check(folder, seed), block, 60, tmp_path)
