"""Random conditions on random columns, compared with their evaluation by pandas.

Every case is a function of its seed, which pytest prints as the name of the test:

    pytest tests/oracle/test_selecting.py -k 17
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.oracle.conditions import CLASSES, COMPARISONS, Column, Drawing, draw_columns
from tests.support.drawn_cases import check_block

DEFAULT = 15  # cases of the default suite
BLOCK, BLOCKS = 60, 3  # cases of the slow part
CONDITIONS = 25  # of each case
WORDS = [*(f" {sign} " for sign in [*COMPARISONS, "and", "or", "+", "-", "*", "/", "%"]), "not "]
WORDS += [" in [", " in (", "not in", " is None", " is not None", "has.", "len(", ".lower()"]
WORDS += [".startswith(", ".endswith(", "json.", "`two words`", "`class`", "9223"]


@pytest.mark.parametrize("seed", range(DEFAULT))
def test_a_random_condition_chooses_the_rows_that_pandas_chooses(seed: int, tmp_path: Path) -> None:
    """This holds for missing values, nan, infinities, large integers and any text."""
    check_case(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_more_random_conditions_choose_the_rows_that_pandas_chooses(
    block: int, tmp_path: Path
) -> None:
    check_block(check_case, block, BLOCK, tmp_path)


def check_case(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    count = rng.randrange(1, 60)
    columns = draw_columns(rng, count)
    index = pack(rng, columns, folder / "set")
    frame = index.to_pandas()
    for column in columns:
        assert repr(index.table[column.name].to_pylist()) == repr([*column.values]), column.name
        assert frame[column.name].isna().sum() >= sum(value is None for value in column.values)
    drawing = Drawing(rng, columns)
    for _ in range(CONDITIONS):
        condition = drawing.condition()
        if not condition.rows:
            with pytest.raises(wt.UsageError, match=f"holds for none of {count} samples"):
                index.where(condition.text)
            continue
        chosen = [int(key) for key in index.where(condition.text).table["key"].to_pylist()]
        assert chosen == condition.rows, condition.text
    if condition.rows:
        with wt.Loader(index, where=condition.text, batch_size=1, shuffle=False) as loader:
            assert len(loader) == len(condition.rows)


def pack(rng: random.Random, columns: Sequence[Column], folder: Path) -> wt.Index:
    """Pack a sample for each row; its key is the number of the row."""

    def samples() -> Iterator[dict[str, Any]]:
        for row in range(len(columns[0].values)):
            document = {column.name: stored(column.values[row]) for column in columns}
            if rng.random() < 0.5:  # an entry that is missing, or null
                document = {name: value for name, value in document.items() if value is not None}
            yield {"__key__": f"{row:06d}", "json": json.dumps(document).encode()}

    classes = [column.name for column in columns if column.kind == "class"]
    labels = [wt.Label(name, "class", "json", name, CLASSES) for name in classes]
    most = rng.choice((1, 7, 1000))
    return wt.pack(samples(), str(folder), labels=labels, shuffle=False, max_shard_samples=most)


def stored(value: Any) -> Any:
    """Return a value as a conversion stores it: JSON has no nan and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def test_the_default_cases_cover_every_kind_of_condition() -> None:
    """Most conditions choose some rows, not all or none, and every word of the language occurs."""
    counts, texts = Counter[bool](), list[str]()
    for seed in range(DEFAULT):
        rng = random.Random(seed)
        drawing = Drawing(rng, draw_columns(rng, 30))
        for _ in range(CONDITIONS):
            condition = drawing.condition()
            texts.append(condition.text)
            counts[0 < len(condition.rows) < 30] += 1
    assert counts[True] > 0.5 * counts.total()
    occurs = {word: sum(word in text for text in texts) for word in WORDS}
    assert min(occurs.values()) >= 3, {word: count for word, count in occurs.items() if count < 3}
