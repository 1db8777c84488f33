"""Options of `wt.bench`. Each is declared once, and is a keyword argument and a flag."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Literal

from wdstrain.errors import UsageError
from wdstrain.runtime.options import option, parse_size
from wdstrain.shards.options import CheckedOptions, shard_urls, where_option

if TYPE_CHECKING:
    from wdstrain.report.terminal import Reporter
    from wdstrain.shards.index import Index
    from wdstrain.storage.addresses import Urls


def _python_only(default: Any, help: str) -> Any:
    return option(default, help, flag=None)


@dataclass(frozen=True)
class LoaderChoices(CheckedOptions):
    """Options that `bench` gives to each `Loader`, by the same names."""

    _: KW_ONLY
    where: str | None = where_option("read samples")
    num_workers: int = option(
        0, "worker processes that decode; 0: threads of this process", metavar="N", least=0
    )
    batch_size: int = option(64, "samples per batch", metavar="N", least=1)
    shuffle: bool = option(True, "shuffle the samples; without it, they are read in file order")
    shuffle_buffer: int | None = option(
        None,
        "shuffle buffer in samples (default: as many as 256 MB hold)",
        metavar="N",
        least=1,
    )
    balance: str | None = option(
        None, "column, each value of which occurs equally often in an epoch", metavar="COL"
    )
    seed: int = option(0, "seed of order and augmentation", metavar="N")
    cache_dir: str | os.PathLike[str] | None = option(
        None, "folder for copies of shards from servers", metavar="DIR"
    )
    cache_limit: int | str | None = option(
        None,
        "largest size of that folder, such as 200GB (default: no limit)",
        metavar="SIZE",
        parse=parse_size,
    )
    on_error: Literal["raise", "replace", "mark"] = _python_only(
        "replace", "bad samples: raise, replace or mark them"
    )
    multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = _python_only(
        None, "start method of worker processes: fork, forkserver or spawn"
    )
    collate_fn: Callable[..., Any] | None = _python_only(
        None, "function of a list of examples of `transform`"
    )


@dataclass(frozen=True)
class BenchOptions(LoaderChoices):
    """Options of `wt.bench`."""

    urls: Urls | Index = shard_urls()
    fields: Mapping[str, Any] | None = _python_only(
        None,
        "fields to deliver, as for `wt.Loader` (default: images, or arrays, and the labels of the "
        "index; bytes if there are none)",
    )
    transform: Callable[..., Any] | None = _python_only(
        None, "function of a sample, in place of fields"
    )
    _: KW_ONLY
    image_size: int = option(224, "side of the images in pixels", metavar="N", least=1)
    augment: str = option(
        "rrc+flip",
        "augmentation of the images: rrc, flip, trivialaugment, randaugment, with + between; or "
        "none",
        metavar="WORDS",
    )
    as_bytes: bool = option(False, "deliver bytes, and decode nothing", flag="--bytes")
    seconds: float = option(1.5, "duration of each measurement in seconds", metavar="S")
    tune: bool = option(
        False,
        "also measure other numbers of worker processes, and print the command to use",
    )
    progress: Reporter | bool | None = _python_only(
        None,
        "object with step(title, done, total, text, unit) and line(text) that shows progress "
        "(default: in the terminal or notebook; False: none)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seconds > 0:
            raise UsageError(
                "must be > 0.", "The default is 1.5.", option="seconds", value=self.seconds
            )
        from wdstrain.decode.transforms import Augment  # only now: it loads NumPy and Pillow

        Augment.parse(self.augment)
