"""Addresses as webdataset takes them, as the paths of shards."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from typing import Any

from braceexpand import braceexpand

from wdstrain.errors import UsageError
from wdstrain.storage.addresses import expand
from wdstrain.storage.remote import is_remote, name_of

_COMPRESSED = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)\}")

# Commands that only print a file, as sets of leading words and of flags without a value.
_COMMANDS: tuple[tuple[tuple[str, ...], frozenset[str]], ...] = (
    (("curl",), frozenset("sSLf")),
    (("wget", "-O", "-"), frozenset("q")),
    (("wget", "-O-"), frozenset("q")),
    (("cat",), frozenset()),
    (("gsutil", "cat"), frozenset()),
    (("gcloud", "storage", "cat"), frozenset()),
    (("aws", "s3", "cp"), frozenset()),
)


def has_compressed_name(path: str) -> bool:
    return _COMPRESSED.search(name_of(path)) is not None


def addresses_of(urls: Any) -> list[str]:
    """Return the addresses in the argument `urls` of `wds.WebDataset`, with their patterns.

    A string is split at "::", and `${NAME}` in it becomes the environment variable WDS_NAME.
    Raises UsageError for a command that does more than print a file.
    """
    if isinstance(urls, (str, os.PathLike)):
        addresses = [_substituted(part) for part in os.fspath(urls).split("::")]
    elif isinstance(urls, Iterable) and not isinstance(urls, (bytes, dict)):
        addresses = [os.fspath(url) for url in urls]
    else:
        raise UsageError(
            f"urls={urls!r}: must be an address, or a list of them. Write for example "
            f'"shards/train-{{000000..000041}}.tar".'
        )
    return [_without_command(address) for address in addresses]


def paths_of(addresses: list[str]) -> list[str]:
    """Return the paths of shards and index files, in order. Raises UsageError for missing ones."""
    if not addresses:
        raise UsageError(
            "no address of shards was given. Name a file, a brace pattern or a folder."
        )
    return [path for address in addresses for path in _paths(address)]


def names_of(addresses: list[str]) -> list[str]:
    """Return the paths that brace patterns mean, whether or not the shards exist."""
    names: list[str] = []
    for address in addresses:
        try:
            names += braceexpand(address)
        except ValueError:  # braces that do not pair up: opening the shard is an error
            names.append(address)
    return names


def _paths(address: str) -> list[str]:
    # A server cannot be asked what matches, and an address without .tar means a folder there.
    if is_remote(address) and has_compressed_name(address):
        return list(braceexpand(address))
    return expand(address)


def _substituted(address: str) -> str:
    for _ in range(10):  # a value may name another variable
        before, address = address, _VARIABLE.sub(_value, address)
        if address == before:
            break
    return address


def _value(match: re.Match[str]) -> str:
    name = f"WDS_{match[1]}"
    if name not in os.environ:
        raise UsageError(f"${{{match[1]}}}: {name} is not in the environment. Set it.")
    return os.environ[name]


def _without_command(address: str) -> str:
    """Return the address that a `pipe:` command prints; of `file:` the path; others as they are.

    Nothing is run. Raises UsageError for a command that may do more.
    """
    if not address.startswith("pipe:"):
        return address.removeprefix("file://").removeprefix("file:")
    command = re.sub(r"\|\|\s*true\s*$", "", address.removeprefix("pipe:"))
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)  # operators are own words
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # quotes that do not pair up
        words = []
    for leading, flags in _COMMANDS:
        if words[: len(leading)] != list(leading):
            continue
        rest = [word for word in words[len(leading) :] if not _is_flag(word, flags)]
        if leading[0] == "aws" and rest[-1:] == ["-"]:
            rest = rest[:-1]
        if len(rest) == 1 and not re.search(r"^[-|&;<>()]|[$`*]", rest[0]):
            return rest[0]
    raise UsageError(
        f"{address.split(' ')[0]} ...: an address is never run as a command. Name the file or the "
        f'address itself, for example "https://host/train-{{000000..000041}}.tar"; credentials '
        f"come from the environment."
    )


def _is_flag(word: str, flags: frozenset[str]) -> bool:
    long = {"--silent", "--show-error", "--location", "--fail", "--quiet"}
    return word in long or (word[:1] == "-" and len(word) > 1 and set(word[1:]) <= flags)
