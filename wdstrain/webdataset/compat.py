"""A drop-in for `wds.WebDataset` that reads through the loader.

    dataset = wt.WebDataset(urls, shardshuffle=100).shuffle(1000).decode("pil").to_tuple("jpg", "cls")

The fluid methods are webdataset's own. Only the stages before them differ. Plain shards are planned
as by `wt.Loader`: ranks and worker processes get their samples by count, each once per epoch. Where
that is impossible, whole shards are streamed by `WholeShards`, and the reason is logged once.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset
from webdataset import cache, compat, filters, handlers, shardlists
from webdataset.pipeline import DataPipeline

from wdstrain.errors import ShardError, UsageError, WdstrainError, logger
from wdstrain.loader.options import open_cache, rank_of
from wdstrain.runtime.cached import cached_property
from wdstrain.runtime.options import integer
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import groups_of, index_of, open_shards, recall, remember
from wdstrain.shards.tar import (
    CompressedError,
    Member,
    SkippedMembers,
    grouped,
    is_not_sample,
    skipped_text,
)
from wdstrain.shards.tar_stream import members, open_tar
from wdstrain.storage.addresses import COMPRESSED, expand, is_json
from wdstrain.storage.cache import Cache
from wdstrain.storage.remote import RemoteFile, is_remote, name_of, redacted, shown_path
from wdstrain.webdataset.stream import Epochs, PassEnds, Stream

_BY_COUNT = (shardlists.single_node_only, shardlists.split_by_node)
# Fields with these names are not data: webdataset puts values of its own there.
_RESERVED = {"__key__", "__url__", "__local_path__", "__bad__"}

Handler = Callable[[Exception], Any]  # raises, or returns whether to go on


class WebDataset(compat.WebDataset):  # type: ignore[misc]
    """`wds.WebDataset` over this package's reader: the same arguments, methods and samples.

    urls            as in webdataset, or a folder, a glob or an index.json. No command is run: name
                    the file or the address in place of `pipe:`
    handler         as in webdataset; errors that it skips are logged and counted
    shardshuffle    True or a number: permute all shards, anew in each epoch
    seed            of that order; default: WDS_SEED, or 0. All ranks need the same
    nodesplitter    default or `wds.split_by_node`: split over ranks. None: each rank reads all
    workersplitter  default: split over the worker processes of a DataLoader. None: each reads all
    select_files    gets names with the extension in lower case
    cache_dir, cache_size   the loader's cache of shards on servers

    The arguments detshuffle, repeat, url_to_name and verbose change nothing. Raises UsageError and
    ShardError at once for shards that cannot be read, unless `handler` goes on.
    """

    def __init__(
        self,
        urls: Any,
        handler: Handler = handlers.reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,
        shardshuffle: bool | int | None = None,
        cache_size: int = -1,
        cache_dir: str | os.PathLike[str] | None = None,
        url_to_name: Callable[[str], str] = cache.pipe_cleaner,
        detshuffle: bool = False,
        nodesplitter: Callable[..., Any] | None = shardlists.single_node_only,
        workersplitter: Callable[..., Any] | None = shardlists.split_by_worker,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = None,
    ) -> None:
        DataPipeline.__init__(self)
        self.seed = integer("seed", int(os.environ.get("WDS_SEED", 0)) if seed is None else seed)
        if repeat:
            warnings.warn("WebDataset(repeat=True) changes nothing. Use .repeat()", stacklevel=2)
        if mode not in (None, "resampled"):
            raise UsageError(
                'must be None or "resampled".',
                option="mode",
                value=mode,
            )
        is_resampled = resampled or mode == "resampled"
        reasons = {
            "nodesplitter splits shards": nodesplitter not in (None, *_BY_COUNT),
            "workersplitter splits shards": bool(workersplitter)
            and workersplitter is not shardlists.split_by_worker,
            "rename_files changes which members make a sample": rename_files is not None,
            "they are drawn with replacement": is_resampled,
        }
        raises = handler in (handlers.reraise_exception, filters.reraise_exception)
        index, paths, reason = _resolve(
            _addresses(urls), next(filter(reasons.get, reasons), ""), raises=raises
        )
        logged, shuffle = LoggedHandler(handler), bool(shardshuffle)
        ranks = (0, 1) if nodesplitter is None else rank_of(None, None)
        folder = os.environ.get("WDS_CACHE", cache_dir)
        size = int(os.environ.get("WDS_CACHE_SIZE", cache_size))
        stored: dict[str, Any] = {}
        if folder is not None and size:
            stored = {"cache_dir": os.path.expanduser(folder), "cache_limit": max(size, 0) or None}
        if index is not None:
            counted = _CountedSamples(
                index,
                handler=logged,
                ranks=ranks,
                by_worker=bool(workersplitter),
                shuffle=shuffle,
                shuffle_buffer=1,  # shards are permuted, samples keep their order in a shard
                seed=self.seed,
                on_error="raise" if raises else "mark",
                max_errors=1.0,
                **stored,
            )
            if select_files is not None:
                counted.select = partial(logged.result, select_files)
            self.append(counted)
            return
        logger.warning(
            "Whole shards are streamed without an index, because %s. Ranks and worker "
            "processes get whole shards, so they may differ in samples, and no pass can be "
            "resumed. Damage is noticed when a shard is read.",
            reason.rstrip("."),
        )
        self.append(
            shardlists.ResampledShards(paths)
            if is_resampled
            else ShardList(paths, shuffle=shuffle, seed=self.seed)
        )
        by_count = filters.slice(ranks[0], None, ranks[1])
        for splitter in (by_count if nodesplitter in _BY_COUNT else nodesplitter, workersplitter):
            if splitter:
                self.append(splitter)
        self.append(WholeShards(logged, select_files, rename_files, stored))
        if empty_check:
            self.append(compat.check_empty)

    def set_epoch(self, number: int) -> None:
        """Make `number` the epoch of the next pass: its order of shards."""
        if hasattr(self.pipeline[0], "set_epoch"):
            self.pipeline[0].set_epoch(number)

    def with_length(self, *args: Any, **options: Any) -> WebDataset:
        """As in webdataset; the result can be pickled, so that worker processes can be spawned."""
        sized: WebDataset = super().with_length(*args, **options)
        sized.__class__ = SizedWebDataset
        return sized


class SizedWebDataset(WebDataset):
    """A `WebDataset` after `.with_length(n)`."""

    def __len__(self) -> int:
        return int(self.size)


class _CountedSamples(Stream):
    """Samples as `wds.WebDataset` has them, split by count."""

    select: Callable[[str], bool] | None = None  # whether a member is read

    @cached_property
    def _cached_paths(self) -> list[str]:
        """Paths of the shards in the cache; "" for those that are not kept there."""
        cache = open_cache(self._options.get("cache_dir"), self._options.get("cache_limit"))
        shards = self._index.shards
        return [cache.place(s.path, s.bytes, s.sha256, s.tag) if cache else "" for s in shards]

    def _sample(
        self, key: str, fields: dict[str, Any], shard: int, epoch: int
    ) -> dict[str, Any] | None:
        if self.select is not None:
            fields = {name: fields[name] for name in fields if self.select(f"{key}.{name}")}
        origin = _origin_of(self._index.shards[shard].path, self._cached_paths[shard])
        return {"__key__": key, **origin, **fields} if fields else None


class LoggedHandler:
    """A handler of webdataset whose decisions are logged, so that no damage is skipped silently.

    Logs the first five errors that it skips, then each whose number is a power of two.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler, self._skipped = handler, 0

    def __call__(self, error: Exception) -> Any:
        """Return None to go on. Raises PassEnds, or the error."""
        go_on = bool(self._handler(error))
        self._skipped += 1
        if self._skipped <= 5 or self._skipped & (self._skipped - 1) == 0:
            logger.warning(
                "%s The handler %s. Errors so far: %d.",
                error if str(error).endswith(".") else f"{error}.",
                "skips this error" if go_on else "ends this pass",
                self._skipped,
            )
        if not go_on:
            raise PassEnds

    def result(self, function: Callable[[str], Any], name: str) -> Any:
        """Return function(name); None after an error of the function that is skipped."""
        try:
            return function(name)
        except Exception as error:
            return self(error)


def _origin_of(path: str, cached: str) -> dict[str, str]:
    """Return the entries of a sample that say where it comes from, as webdataset names them.

    cached: path in the cache; "" if the shard is not kept there.
    """
    local = cached if is_remote(path) else path
    return {"__url__": redacted(path) if is_remote(path) else path} | (
        {"__local_path__": local} if local else {}
    )


class ShardList(IterableDataset[dict[str, str]]):
    """Paths of shards as {"url": path}; every `for` is the next epoch.

    All ranks and worker processes get the same order.
    """

    def __init__(self, paths: list[str], *, shuffle: bool, seed: int) -> None:
        self._paths, self._shuffle, self._seed = paths, shuffle, seed
        self._epochs = Epochs()

    def set_epoch(self, number: int) -> None:
        self._epochs.set(number)

    def __iter__(self) -> Iterator[dict[str, str]]:
        epoch, paths = self._epochs.begin(), list(self._paths)
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(paths)
        return iter([{"url": path} for path in paths])


class WholeShards:
    """Stage from {"url": path} to samples, read forward with the checks of `tar_stream`."""

    def __init__(
        self,
        handler: LoggedHandler,
        select_files: Callable[[str], bool] | None,
        rename_files: Callable[[str], str] | None,
        cache: Mapping[str, Any],
    ) -> None:
        """cache: options `cache_dir` and `cache_limit` of a `Loader`; empty for no cache."""
        self._handler, self._cache_options = handler, cache
        self._select, self._rename = select_files or bool, rename_files or str  # keep all names

    def __call__(self, shards: Iterable[dict[str, str]]) -> Iterator[dict[str, Any]]:
        cache = open_cache(**self._cache_options)
        with suppress(PassEnds), ExitStack() as stack:
            if cache is not None:
                stack.callback(cache.stop)  # the last shard gets its final name
            for shard in shards:
                try:
                    yield from self._samples(shard["url"], cache)
                except WdstrainError as error:  # the sample before it is incomplete, and left out
                    self._handler(error)

    def _samples(self, path: str, cache: Cache | None) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard. Remembers the index of a plain tar of a server."""
        skipped, heads = SkippedMembers(), list[Member]()
        with open_tar(path, cache) as (stream, raw):
            file = raw.raw if isinstance(raw.raw, RemoteFile) else None
            files = self._selected(members(stream, shown_path(path), skipped), heads)
            origin = _origin_of(path, file.cached_path if file else "")
            reserved = {"__key__", *origin}
            for key, fields in grouped(files, shown_path(path), skipped, reserved, self._handler):
                data = {name: member.data for name, member in fields.items()}
                if data.get("__bad__"):
                    skipped['samples with the field "__bad__"'] += 1
                else:
                    yield {"__key__": key, **origin, **data}
            if file and stream is raw:
                with suppress(ShardError):  # torn samples, which the handler skipped
                    rows = grouped(heads, shown_path(path), SkippedMembers())
                    remember(index_of(path, rows, file.size, file.tag, skipped))
        if reasons := skipped_text(skipped):
            logger.info("%s: left out, no part of any sample: %s", shown_path(path), reasons)

    def _selected(self, files: Iterable[Member], heads: list[Member]) -> Iterator[Member]:
        """Yield the selected members under their new names. heads: gets all, without their data."""
        for member in files:
            heads.append(member._replace(data=b""))
            if not is_not_sample(member.name):  # such members are counted under their own names
                name = self._handler.result(self._rename, member.name)
                if name is None or not self._handler.result(self._select, name):
                    continue
                member = member._replace(name=name)
            yield member


def _addresses(urls: Any) -> list[str]:
    """Return the addresses in the argument `urls` of `wds.WebDataset`, without braces.

    A string is split at "::", and `${NAME}` in it becomes the environment variable WDS_NAME.
    Raises UsageError for a command.
    """
    if isinstance(urls, (str, os.PathLike)):
        addresses = [os.fspath(urls)]
        try:
            addresses = shardlists.expand_urls(os.fspath(urls))
        except AssertionError as error:  # "missing environment variable wds_NAME"
            name = str(error).rpartition("wds_")[2]
            raise UsageError(
                f"${{{name}}}: WDS_{name} is not in the environment.", "Set it."
            ) from None
        except ValueError:  # braces that do not pair up: opening the shard is an error
            pass
    elif isinstance(urls, Iterable) and not isinstance(urls, (bytes, dict)):
        addresses = [os.fspath(url) for url in urls]
    else:
        raise UsageError(
            "must be an address, or a list of them.",
            'Write for example "shards/train-{000000..000041}.tar".',
            option="urls",
            value=urls,
        )
    for address in addresses:
        if address.startswith("pipe:"):
            raise UsageError(
                f"{address.split(' ')[0]} ...: an address is never run as a command.",
                "Name the file or the address itself, for example "
                '"https://host/train-{000000..000041}.tar"; credentials come from the '
                "environment. For other commands use wds.WebDataset.",
            )
    return [address.removeprefix("file://").removeprefix("file:") for address in addresses]


def _resolve(
    addresses: list[str], reason: str, *, raises: bool
) -> tuple[Index | None, list[str], str]:
    """Return the index of shards, their paths, and why they cannot be split by count.

    reason: known so far. raises: errors are raised; otherwise they are a reason. The index is None
    if there is a reason.
    """
    paths = addresses
    try:
        paths = expand(addresses)
        reason = reason or _reason(paths)
        if reason and not any(map(is_json, paths)):
            return None, paths, reason
        index = open_shards(paths)
    except WdstrainError as error:
        if raises and not isinstance(error, CompressedError):
            raise
        return None, paths, f"of an error: {error}"
    paths = [shard.path for shard in index.shards]
    if not len(index):
        reason = "they hold no samples"
    for name in sorted(_RESERVED & set(index.fields)):
        reason = f"they hold the field {name}"
    return None if reason else index, paths, reason


def _reason(paths: list[str]) -> str:
    """Return why shards cannot be split by count before any is opened; "" if they can."""
    if len(set(paths)) < len(paths):
        return "some are named several times"
    for path in (path for path in paths if COMPRESSED.search(name_of(path))):
        return f"{shown_path(path)} is compressed"
    for bare, index in groups_of(path for path in paths if is_remote(path) and not is_json(path)):
        if index is None and len(recall(bare)) < len(bare):
            return f"{shown_path(bare[0])} has no index beside it (wdstrain index makes one)"
    return ""
