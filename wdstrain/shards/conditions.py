"""Conditions on the columns of an index, such as `kids and label != 'Other'`.

A condition has the grammar of `expressions`, and is evaluated for all samples at once, without any
bytes of shards. Names: the columns, by their names in `Index.table` or by where they are stored
(`cls`, `json.kind`); key, shard, split; size, size.FIELD in bytes; has.NAME, whether a sample has a
field or a value in a column. A name that Python's grammar does not allow stands in backticks.

A class equals its name or its number. A comparison with a missing value is neither true nor false,
as in SQL: a sample is chosen only if the whole condition is true. `is None` finds missing values.
"""

from __future__ import annotations

import ast
import logging
import re
from itertools import pairwise
from keyword import iskeyword

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wdstrain.errors import UsageError
from wdstrain.report.printing import printable
from wdstrain.shards.columns import Column
from wdstrain.shards.evaluation import COLUMNS, Evaluation, Samples, TableRows
from wdstrain.shards.expressions import parse

Bools = npt.NDArray[np.bool_]

_QUOTED_NAME = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`([^`]+)`""")
_OPERATORS = {"and", "or", "not", "in", "is", "True", "False", "None"}  # words of a condition
_log = logging.getLogger("wdstrain")


def matching(index: Samples | TableRows, text: str) -> Bools:
    """Return which samples a condition holds for. bool[len(index)]

    Raises UsageError for a condition that is not valid or that does not fit the columns.
    """
    if not isinstance(text, str):
        raise UsageError(f"where={text!r}: must be a condition, such as \"label != 'Other'\".")
    plain = _QUOTED_NAME.sub(lambda m: f"{COLUMNS}[{m[1]!r}]" if m[1] else m[0], text)
    try:
        tree = parse(plain, (ast.Is, ast.IsNot))
    except UsageError as error:
        words = set(re.findall(r"\w+", plain))
        reserved = sorted(word for word in words - _OPERATORS if iskeyword(word))
        if not reserved:
            raise
        raise UsageError(
            f"{error}. Python reserves the word {reserved[0]}: a column of this name stands in "
            f"backticks, `{reserved[0]}` or `json.{reserved[0]}`."
        ) from None
    evaluation = Evaluation(index, text)
    try:
        holds = evaluation.truth(tree)
    except (pa.ArrowException, RecursionError, OverflowError) as error:
        raise UsageError(f"{text!r} cannot be evaluated ({error}).") from None
    if isinstance(holds, pa.Scalar):
        return np.full(len(index), bool(holds.as_py()))
    result = np.asarray(pc.fill_null(holds, False).to_numpy(zero_copy_only=False), np.bool_)
    # A condition with `is` deals with missing values itself.
    if not isinstance(index, TableRows) and not re.search(r"\bis\b", plain):
        for name, column in evaluation.used.items():
            _log_shards_without(index, text, name, column, result)
    return result


def _log_shards_without(
    index: Samples, text: str, name: str, column: Column, chosen: Bools
) -> None:
    """Log that shards have no value in a column of a condition, and so no chosen sample.

    Sets without the column, joined with others, are such shards.
    """
    if not column.values.null_count:
        return
    edges = np.concatenate([[0], np.cumsum(index.counts)])
    without = [
        number
        for number, (start, stop) in enumerate(pairwise(edges.tolist()))
        if start < stop
        and not chosen[start:stop].any()
        and column.values.slice(start, stop - start).null_count == stop - start
    ]
    if without:
        _log.warning(
            "%r: %d samples of %d shards have no value in the column %s, such as those of %s. None "
            "of them is chosen.",
            text,
            int(index.counts[without].sum()),
            len(without),
            printable(name),
            index.shards[without[0]].name,
        )


def column_values(index: Samples, name: str) -> pa.Array:
    """Return the values of the column with a name of a condition. Raises UsageError."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"{name!r} is not the name of a column.")
    return Evaluation(index, name).named(name)
