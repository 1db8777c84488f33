"""Options that are declared once, as fields of a dataclass.

The same fields are the keyword arguments of a public function (`takes`), its documentation, and the
flags of a verb (`wdstrain.cli.common`), so that these cannot differ. Also here: the texts of values,
such as 256MB, checks of arguments, and settings in environment variables, which are read when they
are used.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import sys
import threading
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from operator import index
from textwrap import fill
from types import UnionType
from typing import Any, ParamSpec, TypeVar

from wdstrain.errors import UsageError

P = ParamSpec("P")
O = TypeVar("O")  # noqa: E741
R = TypeVar("R")

REQUIRED: Any = dataclasses.MISSING

# values of NumPy have these types, too
_NUMBERS: dict[Any, Any] = {int: Integral, float: Real}
# bytes of the units in which people write sizes: 256MB, 256M, 4GiB, 1000
_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def refuse(exists: object, problem: str, hint: str = "", /, **options: Any) -> None:
    """Raise UsageError for a problem that exists. options: those that it and the hint name."""
    if exists:
        raise UsageError(problem, hint, options)


def integer(name: str, value: Any, least: int | None = None) -> int:
    """Return an argument as a Python int.

    value: an int or a NumPy integer. name: the name of the argument, for the error message.
    Raises UsageError for a bool, a float, any other type, and a value below `least`.
    """
    rule = "must be an integer" + (f" >= {least}" if least is not None else "")
    try:
        number = int(index(value))
    except TypeError:
        raise UsageError(f"{rule}.", option=name, value=value) from None
    if isinstance(value, bool) or (least is not None and number < least):
        raise UsageError(f"{rule}.", option=name, value=value)
    return number


def is_number(value: Any) -> bool:
    """Return whether an argument is a real number of Python or NumPy."""
    return isinstance(value, Real)


def option(
    default: Any,
    help: str,
    *,
    metavar: str = "",
    parse: Callable[[str], Any] | None = None,
    flag: str | None = "",
    several: bool = False,
    negatable: bool = False,
    python: str = "",
    **more: Any,
) -> Any:
    """Return a dataclass field with what its keyword argument and its flag need.

    default: value, or REQUIRED. help: starts with a verb or noun phrase, and gives the unit; the
    default is added. metavar: name of the value in help texts. parse: makes the value of the flag's
    text, or raises ValueError. flag: its names with spaces between, if not made from that of the
    field; None: Python only. several: a flag may be given several times, as each with `parse_list`,
    and a positional option may have several words. negatable: there is --no-NAME too, as for an
    option that is True by default. python: help of the keyword argument, if it differs. more: kept
    in the metadata: `least`, the least integer (`shards.options.CheckedOptions`); `nargs`, as for
    argparse; `switches`, {value: help}, for a flag of each value.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "metavar": metavar,
            "parse": parse,
            "flag": flag,
            "several": several,
            "negatable": negatable,
            "python": python,
            **more,
        },
    )


def help_text(field: dataclasses.Field[Any]) -> str:
    """Return the help text of an option with its default."""
    text, default = str(field.metadata["help"]), field.default
    choices = field.metadata.get("choices")
    if choices and not all(str(choice) in text for choice in choices):
        text = f"{text}: {', '.join(map(str, choices))}"
    is_whole = "(default" in text or any(default is no for no in (REQUIRED, None, False, ()))
    return text if is_whole else f"{text} (default: {default})"


def hinted(function: Callable[P, R], hints: Mapping[str, str] | None = None) -> Callable[P, R]:
    """Return a function whose error for an unknown argument names the argument to use.

    hints: {unknown argument: next step}; for others, a name that resembles it is the hint. Raises
    TypeError, as Python does.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        signature = inspect.signature(call)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in signature.parameters), "")
            near = "".join(get_close_matches(unknown, signature.parameters, 1))
            hint = (hints or {}).get(unknown) or (near and f"Did you mean {near}?")
            raise TypeError(
                f"{function.__qualname__.removesuffix('.__init__')}() {error}"
                + (f". {hint}" if hint else "")
            ) from None
        return function(*args, **kwargs)

    return call


def takes(options: Callable[P, O]) -> Callable[[Callable[[O], R]], Callable[P, R]]:
    """Return a decorator that gives a function the fields of `options` as its arguments.

    The decorated function gets one object. Callers, type checkers and `help` see the fields.
    """

    def decorate(function: Callable[[O], R]) -> Callable[P, R]:
        @hinted
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(options(*args, **kwargs))

        returns = inspect.signature(function).return_annotation
        del vars(call)["__wrapped__"]  # pages of documentation would show its one argument
        vars(call)["__signature__"] = _own_first(options).replace(return_annotation=returns)
        call.__doc__ = f"{inspect.getdoc(function)}\n\n{_described(options)}"
        return call

    return decorate


def _own_first(options: Any) -> inspect.Signature:
    """Return the signature of a dataclass, with its own keywords before those of its bases."""
    signature, hints = inspect.signature(options), types_of(options)
    inherited = {
        field.name
        for base in filter(dataclasses.is_dataclass, options.__bases__)
        for field in dataclasses.fields(base)
    }
    parameters = sorted(
        (p.replace(annotation=hints[p.name]) for p in signature.parameters.values()),
        key=lambda parameter: (
            parameter.kind is parameter.KEYWORD_ONLY,
            parameter.kind is parameter.KEYWORD_ONLY and parameter.name in inherited,
        ),
    )
    return signature.replace(parameters=parameters)


def types_of(options: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass; its name, if it is not imported here.

    Modules of options import no types but those that flags need, so that help is fast.
    """
    known: dict[str, Any] = {}
    for base in reversed(options.__mro__):
        known |= vars(sys.modules[base.__module__])
    types = {}
    for field in dataclasses.fields(options):
        try:
            types[field.name] = eval(str(field.type), known)
        except NameError:
            types[field.name] = field.type
    return types


def _described(options: Any) -> str:
    """Return the lines of a docstring that explain each argument."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    texts = (
        f"{name}: {fields[name].metadata['python'] or help_text(fields[name])}"
        for name in _own_first(options).parameters
    )
    lines = [fill(text, 96, initial_indent=" " * 4, subsequent_indent=" " * 8) for text in texts]
    return "\n".join(["Arguments:", *lines])


def choices_of(hint: Any) -> tuple[str, ...]:
    """Return the values that an option may have; empty if they are not a fixed list."""
    kinds = (
        one for one in (hint, *typing.get_args(hint)) if typing.get_origin(one) is typing.Literal
    )
    return typing.get_args(next(kinds, None))


def fits(value: object, hint: Any) -> bool:
    """Return whether a value has the type of an option; True if the type is not imported here."""
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, UnionType):
        return any(fits(value, one) for one in typing.get_args(hint))
    if kind is bool:  # of NumPy, too; "no" would be true
        return isinstance(value, int) or type(value).__name__ in ("bool", "bool_")
    if kind is Sequence:  # an array, too; a text would be a list of letters
        if isinstance(value, str | bytes) or not isinstance(value, Collection):
            return False
        return all(fits(item, typing.get_args(hint)[0]) for item in value)
    if kind is Mapping and isinstance(value, Mapping):
        name, own = typing.get_args(hint)
        return all(fits(key, name) and fits(item, own) for key, item in value.items())
    if kind is typing.Literal:
        return value in typing.get_args(hint)
    is_unknown = kind is Any or not isinstance(kind, type)
    return is_unknown or isinstance(value, _NUMBERS.get(kind, kind))


def parse_list(text: str) -> list[str]:
    """Return the names of a list with commas between them."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_pair(text: str) -> tuple[str, str]:
    """Return both sides of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (equals and name.strip() and value.strip()):
        raise ValueError(f"{text!r} is not a pair; write NAME=VALUE")
    return name.strip(), value.strip()


def parse_pairs(text: str) -> dict[str, str]:
    """Return the pairs of A=B,C=D."""
    return dict(map(parse_pair, parse_list(text)))


def as_list(value: str | Sequence[str]) -> list[str]:
    """Return names as a list; a single name may be given by itself."""
    return [value] if isinstance(value, str) else list(value)


def parse_size(text: str) -> int:
    """Return the number of bytes that a text states. Raises ValueError if it is not a size."""
    number = text.strip().upper().rstrip("BIKMGT")
    try:
        return int(float(number) * _UNITS[text.strip().upper()[len(number) :].strip()])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a size; write for example 256MB") from None


def format_size(size: float) -> str:
    """Return a number of bytes as short text: 512 B, 7.3 KB, 94.1 MB."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


def seconds_setting(name: str, default: float) -> float:
    """Return a number of seconds from the environment. Raises UsageError for another value."""
    rule = f"a number of seconds >= 0. Unset it for {default:g} s"
    return _setting(name, default, float, (0, threading.TIMEOUT_MAX), rule)


def size_setting(name: str, default: int) -> int:
    """Return a number of bytes from the environment. Raises UsageError for another value."""
    rule = "a size of at least 1 byte, such as 4MiB"
    return int(_setting(name, default, parse_size, (1, math.inf), rule))


def _setting(
    name: str,
    default: float,
    parse: Callable[[str], float],
    limits: tuple[float, float],
    rule: str,
) -> float:
    text = os.environ.get(name, "").strip()
    try:
        value = parse(text) if text else default
    except ValueError:
        value = math.nan
    refuse(not limits[0] <= value <= limits[1], f"{name}={text!r}: must be {rule}.")
    return value
