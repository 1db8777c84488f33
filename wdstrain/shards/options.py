"""Options that several verbs share, those of `wt.index`, and their checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, Field, dataclass, fields
from typing import TYPE_CHECKING, Any

from wdstrain.errors import UsageError
from wdstrain.runtime.options import (
    REQUIRED,
    choices_of,
    fits,
    integer,
    option,
    parse_list,
    types_of,
)

if TYPE_CHECKING:
    from wdstrain.storage.addresses import Urls

_ADDRESSES = (
    "folder, index.json, tar, glob or brace pattern of shards, or an http(s)://, s3://, gs://, "
    "az:// or hf:// address of these"
)


def shard_urls(text: str = _ADDRESSES, **more: Any) -> Any:
    return option(
        REQUIRED,
        text,
        metavar="URL",
        several=True,
        **more,
    )


def where_option(subject: str) -> Any:
    """Return the option `where`. subject: what is done with the samples, such as "count samples"."""
    return option(
        None,
        f"{subject} whose columns in the index meet a condition, such as "
        "\"kids and label != 'Other'\"",
        metavar="EXPR",
    )


def read_classes(text: str) -> list[str]:
    """Return class names from a file with a name on each line, or from a list with commas.

    Raises UsageError for a file that is missing.
    """
    if os.path.exists(text):
        from wdstrain.storage.files import read_whole  # only now: it loads urllib3

        names = (read_whole(text) or b"").decode("utf-8-sig").splitlines()
    elif os.sep in text or text.endswith(".txt"):
        raise UsageError(
            f"classes {text[:80]!r}: there is no such file.",
            "Give one with a name on each line, or the names themselves: cat,dog",
        )
    else:
        names = text.split(",")
    return [name.strip() for name in names if name.strip()]


def ignored_number() -> Any:
    return option(
        None, "number of the pixels of masks that have no class, beside 255", metavar="N", least=0
    )


@dataclass(frozen=True)
class CheckedOptions:
    """Options whose types, least integers and fixed choices are checked.

    Raises UsageError. Integers of NumPy become integers of Python, the text of a flag its value,
    and None the default of an option that may be left out.
    """

    def __post_init__(self) -> None:
        hints = types_of(type(self))
        for field in fields(self):
            name, hint = field.name, hints[field.name]
            value = parsed(field, getattr(self, name), hint)
            if value is None and field.default in (None, ()):
                value = field.default
            elif hint is int or "least" in field.metadata:
                value = integer(name, value, field.metadata.get("least"))
            elif not fits(value, hint):
                choices = ", ".join(choices_of(hint))
                rule = f"must be one of {choices}" if choices else f"must be {field.type}"
                raise UsageError(f"{rule}.", option=name, value=value)
            object.__setattr__(self, name, value)


def parsed(field: Field[Any], value: Any, hint: Any) -> Any:
    """Return the value of an option that may be given as the text of its flag.

    An option with a least value is an integer, also if its type allows text, such as 256MB. Raises
    UsageError.
    """
    parse = field.metadata.get("parse")
    if (
        parse is None
        or not isinstance(value, str)
        or ("least" not in field.metadata and fits(value, hint))
    ):
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise UsageError(f"{error}.", option=field.name, value=value) from None


@dataclass(frozen=True)
class IndexOptions(CheckedOptions):
    """Options of `wt.index`."""

    urls: Urls = shard_urls("folder of the shards, or a glob of them, on this machine")
    _: KW_ONLY
    columns: Sequence[str] = option(
        (),
        "fields, and entries of JSON fields, whose values become columns of the index, such as "
        "cls,json.kind",
        metavar="NAME[,NAME...]",
        parse=parse_list,
    )
    label: str | None = option(
        None,
        "field or entry of JSON that holds the label, such as cls or json.kind; KIND is class, "
        "number or multi (default: decided by the values)",
        metavar="NAME[:KIND]",
    )
    classes: Sequence[str] | None = option(
        None,
        "names of the label's classes in the order of their numbers (default: sorted)",
        metavar="FILE|A,B,...",
        parse=read_classes,
    )
    ignore: int | None = ignored_number()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("classes", "ignore"):
            if getattr(self, name) is not None and self.label is None:
                raise UsageError(
                    f"{{{name}}} needs {{label}}, whose values it describes.",
                    "Give both.",
                    {name: ..., "label": ...},
                )
