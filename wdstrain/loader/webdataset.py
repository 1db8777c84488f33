"""A drop-in for `wds.WebDataset` that reads through the loader.

    dataset = wt.WebDataset(urls, shardshuffle=100).shuffle(1000).decode("pil").to_tuple("jpg", "cls")

The fluid methods are webdataset's own. Only the stages before them differ. Plain shards are planned
as by `wt.Loader`: ranks and worker processes get their samples by count, each once per epoch. Where
that is impossible, whole shards are streamed (`shard_samples`), and the reason is logged once.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from webdataset import cache, compat, filters, handlers, shardlists
from webdataset.pipeline import DataPipeline

from wdstrain.errors import UsageError, WdstrainError
from wdstrain.loader.options import rank_of
from wdstrain.loader.planning import open_shards
from wdstrain.loader.shard_samples import (
    RESERVED,
    Handler,
    LoggedHandler,
    ShardList,
    ShardSamples,
    ShardSplit,
    origin_of,
    split_by_worker,
)
from wdstrain.loader.stream import PlannedSamples
from wdstrain.loader.tar_stream import is_compressed, shown
from wdstrain.loader.webdataset_urls import addresses_of, has_compressed_name, names_of, paths_of
from wdstrain.order.plan import integer
from wdstrain.shards.index import Index
from wdstrain.shards.tar_headers import BLOCK
from wdstrain.storage.addresses import is_json
from wdstrain.storage.local import open_source

_YAML = (".yaml", ".yml")
_BY_COUNT = (shardlists.single_node_only, shardlists.split_by_node)

_log = logging.getLogger("wdstrain")


class WebDataset(compat.WebDataset):  # type: ignore[misc]
    """`wds.WebDataset` over this package's reader: the same arguments, methods and samples.

    urls            as in webdataset, or a folder, a glob or an index.json. A `pipe:` command that
                    only prints a file (curl, cat, gsutil cat, aws s3 cp) means that file; nothing is
                    run
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
            raise UsageError(f'mode={mode!r}: must be None or "resampled".')
        options = _Options(
            handler=handler,
            shuffle=bool(shardshuffle),
            seed=self.seed,
            nodesplitter=nodesplitter,
            workersplitter=workersplitter,
            select_files=select_files,
            rename_files=rename_files,
            cache=_cache_options(cache_dir, cache_size),
        )
        is_yaml = isinstance(urls, (str, os.PathLike)) and os.fspath(urls).endswith(_YAML)
        if isinstance(urls, dict) or is_yaml:
            stages = options.by_shards(shardlists.MultiShardSample(urls), "a YAML list names them")
        elif resampled or mode == "resampled":
            stages = options.resampled(addresses_of(urls))
        else:
            stages = options.stages(addresses_of(urls))
        for stage in stages:
            self.append(stage)
        if empty_check and not isinstance(stages[0], CountedSamples):
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


class CountedSamples(PlannedSamples):
    """Samples as in webdataset, split by count; every `for` is the next epoch."""

    def __init__(
        self,
        index: Index,
        handler: LoggedHandler | None,
        select_files: Callable[[str], bool] | None,
        **options: Any,
    ) -> None:
        """handler: decides about errors; None: they are raised. options: of `PlannedSamples`."""
        super().__init__(index, **options)
        self._on_error, self._select = handler, select_files
        self._origins = [origin_of(shard.path) for shard in index.shards]

    def _sample(
        self, shard: int, key: str, fields: dict[str, bytes], epoch: int
    ) -> dict[str, Any] | None:
        if self._select is not None:
            fields = {name: fields[name] for name in fields if self._is_selected(f"{key}.{name}")}
            if not fields:
                return None
        return {"__key__": key, **self._origins[shard], **fields}

    def _is_selected(self, name: str) -> bool:
        assert self._select is not None
        try:
            return bool(self._select(name))
        except Exception as error:  # of the caller's function
            if self._on_error is None or not self._on_error(error, 0):
                raise
            return False


@dataclass(frozen=True)
class _Options:
    """Arguments of `WebDataset` that choose and make its first stages."""

    handler: Handler
    shuffle: bool
    seed: int
    nodesplitter: Callable[..., Any] | None
    workersplitter: Callable[..., Any] | None
    select_files: Callable[[str], bool] | None
    rename_files: Callable[[str], str] | None
    cache: dict[str, Any]

    @property
    def raises(self) -> bool:
        return self.handler in (handlers.reraise_exception, filters.reraise_exception)

    @property
    def ranks(self) -> tuple[int, int]:
        return (0, 1) if self.nodesplitter is None else rank_of(None, None)

    def stages(self, addresses: list[str]) -> list[Any]:
        """Return the stages that read each shard once per epoch, split by count if possible."""
        paths, index, reason = self._resolve(addresses)
        if index is None or reason:
            return self.by_shards(ShardList(paths, shuffle=self.shuffle, seed=self.seed), reason)
        samples = CountedSamples(
            index,
            None if self.raises else LoggedHandler(self.handler),
            self.select_files,
            ranks=self.ranks,
            by_worker=bool(self.workersplitter),
            shuffle=self.shuffle,
            shuffle_buffer=1,  # shards are permuted, samples keep their order in a shard
            seed=self.seed,
            on_error="raise" if self.raises else "mark",
            max_errors=1.0,
            **self.cache,
        )
        return [samples]

    def resampled(self, addresses: list[str]) -> list[Any]:
        """Return the stages that draw shards with replacement, without end."""
        paths = paths_of(addresses)
        if any(map(is_json, paths)):
            paths = [shard.path for shard in open_shards(paths).shards]
        alone = replace(self, nodesplitter=None) if self.nodesplitter in _BY_COUNT else self
        if alone.workersplitter is shardlists.split_by_worker:
            alone = replace(alone, workersplitter=None)
        return alone.by_shards(shardlists.ResampledShards(paths), "")

    def by_shards(self, source: Any, reason: str) -> list[Any]:
        """Return the stages that read whole shards. reason: why, for the log; "" logs nothing."""
        if reason:
            _log.warning(
                "Whole shards are streamed without an index, because %s. Ranks and worker "
                "processes get whole shards, so they may differ in samples, and no pass can be "
                "resumed. Damage is noticed when a shard is read.",
                reason.rstrip("."),
            )
        stages = [source]
        if self.nodesplitter is not None and self.nodesplitter not in _BY_COUNT:
            stages.append(self.nodesplitter)
        elif self.nodesplitter is not None:
            stages.append(ShardSplit(self.ranks))
        if self.workersplitter is shardlists.split_by_worker:
            stages.append(split_by_worker)
        elif self.workersplitter:
            stages.append(self.workersplitter)
        handler = LoggedHandler(self.handler)
        read = ShardSamples(handler, self.select_files, self.rename_files, self.cache)
        return [*stages, read]

    def _resolve(self, addresses: list[str]) -> tuple[list[str], Index | None, str]:
        """Return (paths of shards, their index, the reason why they cannot be split by count)."""
        try:
            paths = paths_of(addresses)
        except WdstrainError as error:
            if self.raises:
                raise
            return names_of(addresses), None, f"of an error: {error}"
        reason = self._reason(paths)
        has_index = any(map(is_json, paths))
        if reason and not has_index:
            return paths, None, reason
        try:
            index = open_shards(paths)
        except WdstrainError as error:
            if compressed := _first_compressed(paths):
                return paths, None, f"{shown(compressed)} is compressed"
            if self.raises or has_index:
                raise
            return paths, None, f"of an error: {error}"
        paths = [shard.path for shard in index.shards]
        if not len(index):
            return paths, None, "they hold no samples"
        if reserved := sorted(RESERVED & set(index.fields)):
            return paths, None, f"they hold the field {reserved[0]}"
        return paths, index, reason

    def _reason(self, paths: list[str]) -> str:
        """Return why shards cannot be split by count, as far as their paths say; "" if they can."""
        if self.nodesplitter is not None and self.nodesplitter not in _BY_COUNT:
            return "nodesplitter splits shards"
        if self.workersplitter and self.workersplitter is not shardlists.split_by_worker:
            return "workersplitter splits shards"
        if self.rename_files is not None:
            return "rename_files changes which members make a sample"
        if len(set(paths)) < len(paths):
            return "some are named several times"
        compressed = next(filter(has_compressed_name, paths), None)
        return f"{shown(compressed)} is compressed" if compressed else ""


def _first_compressed(paths: list[str]) -> str | None:
    """Return the first shard whose first bytes are those of a compressed file."""
    for path in paths:
        with suppress(WdstrainError), open_source(path) as source:
            if is_compressed(bytes(source.read(0, min(source.size, BLOCK)))):
                return path
    return None


def _cache_options(folder: str | os.PathLike[str] | None, size: int) -> dict[str, Any]:
    """Return the loader's options for a cache. WDS_CACHE and WDS_CACHE_SIZE come first."""
    folder = os.environ.get("WDS_CACHE", folder)
    size = int(os.environ.get("WDS_CACHE_SIZE", size))
    if folder is None or size == 0:
        return {}
    return {
        "cache_dir": os.path.expanduser(folder),
        "cache_limit": size if size > 0 else None,
    }
