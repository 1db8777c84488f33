"""Flags of the command line, made from the fields of option dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection
from typing import Any

from wdstrain.errors import UsageError
from wdstrain.runtime.options import REQUIRED, choices_of, help_text

_Field = dataclasses.Field[Any]
_PLAIN = (int, float, str)


def add_options(
    parser: argparse.ArgumentParser,
    options: type[Any],
    *,
    only: Collection[str] | None = None,
    groups: dict[str, type[Any]] | None = None,
) -> None:
    """Add a positional word or a flag for each field of a dataclass.

    only: names of fields; default: all. groups: {title: base class whose fields are listed below it}.
    Values that are not given are absent from the parsed arguments, so that the defaults are those of
    the dataclass.
    """
    made = {title: parser.add_argument_group(title) for title in groups or {}}
    group_of = {
        field.name: made[title]
        for title, base in (groups or {}).items()
        for field in dataclasses.fields(base)
    }
    # Python 3.10 accepts types only, and the marker KW_ONLY of a dataclass is none.
    hints = typing.get_type_hints(options, localns={"KW_ONLY": object})
    positional = _positional(options)
    fields = {field.name: field for field in dataclasses.fields(options)}
    names = [*positional, *(name for name in fields if name not in positional)]
    for name in names:
        field = fields[name]
        if (only is not None and name not in only) or field.metadata["flag"] is None:
            continue
        target: Any = group_of.get(name, parser)
        if name in positional and not field.metadata["flag"]:
            _add_positional(target, field)
        else:
            _add_flag(target, field, hints[name])
    parser.set_defaults(flags={**(parser.get_default("flags") or {}), **flags_of(options)})


def flags_of(options: type[Any]) -> dict[str, str]:
    """Return the flag of each option that is not positional, by the name of its keyword argument."""
    positional = _positional(options)
    return {
        field.name: _flag(field)
        for field in dataclasses.fields(options)
        if field.metadata["flag"] is not None
        and (field.metadata["flag"] or field.name not in positional)
    }


def given(arguments: argparse.Namespace, options: type[Any]) -> dict[str, Any]:
    """Return the options that were given, by the names of their keyword arguments."""
    names = [field.name for field in dataclasses.fields(options)]
    values = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return {name: dict(value) if _is_pairs(value) else value for name, value in values.items()}


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, tuple) for v in value)


def _positional(options: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(options) if not field.kw_only]


def _flag(field: _Field) -> str:
    """Return the long name of a flag."""
    return _names(field)[-1]


def _names(field: _Field) -> list[str]:
    return (field.metadata["flag"] or f"--{field.name.replace('_', '-')}").split()


def _add_positional(target: Any, field: _Field) -> None:
    several = {"nargs": "+"} if field.metadata["several"] else {}
    target.add_argument(
        field.name,
        metavar=field.metadata["metavar"] or field.name.upper(),
        help=_escaped(help_text(field)),
        **several,
    )


def _add_flag(target: Any, field: _Field, hint: Any) -> None:
    about, flag = field.metadata, _flag(field)
    words: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if hint is bool:
        no_flag = f"--no-{flag.removeprefix('--')}"
        if field.default is True:
            words["help"] = _escaped(about["no_help"] or f"{about['help']} (default)")
            target.add_argument(no_flag, action="store_false", **words)
            return
        words["help"] = _escaped(help_text(field))
        negatable = argparse.BooleanOptionalAction if about["negatable"] else "store_true"
        target.add_argument(flag, action=negatable, **words)
        return
    if switches := about.get("switches"):
        group = target.add_mutually_exclusive_group()
        for value, text in switches.items():
            group.add_argument(f"--{value}", action="store_const", const=value, help=text, **words)
        return
    words |= {
        "help": _escaped(help_text(field)),
        "required": field.default is REQUIRED,
        "type": _converter(about["parse"], hint),
    }
    if choices := choices_of(field, hint):
        words["choices"] = choices
    else:
        words["metavar"] = about["metavar"] or None
    if about["several"]:
        words |= {"action": "extend", "nargs": "+"} if "nargs" in about else {"action": "append"}
    target.add_argument(*_names(field), **words)


def _converter(parse: Callable[[str], Any] | None, hint: Any) -> Callable[[str], Any]:
    """Return what makes a value of a text, with an error that argparse prints."""
    if parse is None:
        return next((kind for kind in _PLAIN if kind in _parts(hint)), str)

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, UsageError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _escaped(text: str) -> str:
    """Return a help text as argparse takes it, which formats it."""
    return text.replace("%", "%%")
