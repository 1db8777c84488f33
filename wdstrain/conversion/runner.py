"""Convert a source into a folder of shards and their index.

    Listing ----------------------> catalog -> plan of shards -> shards -> index -> in place
    Stream  -> external shuffle --->   |  ^
              images re-encoded  <-----+  |   (with resize or quality: their sizes must be known)
                       +------------------+

The plan depends on the catalog and the options alone, so any number of workers gives the same
bytes. Everything is written into a staging directory (`output_dir`). Each shard carries the
identity of its samples, so `resume` writes only what is missing.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import replace

from wdstrain.conversion.append import appended_result
from wdstrain.conversion.listing import Listing, Source
from wdstrain.conversion.options import Options
from wdstrain.conversion.output_dir import OutputTransaction
from wdstrain.conversion.packer import Packer
from wdstrain.conversion.result import (
    ConversionResult,
    Progress,
    read_result,
)
from wdstrain.conversion.resume import (
    call_of,
    check_call,
    differences,
    first_difference,
    other_conversion,
)
from wdstrain.conversion.set_exchange import SKIPPED_NAME
from wdstrain.conversion.upload import (
    BucketUpdate,
    ShardUploads,
    bucket_update,
    check_free,
    deliver_result,
    outgoing,
)
from wdstrain.errors import SourceError, UsageError
from wdstrain.runtime.machine import collector_paused
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import check_sizes, load
from wdstrain.storage.addresses import INDEX_NAME
from wdstrain.storage.objects import is_object

_COMPARISON = ".comparing"  # staging folder of a comparison, in the folder of a finished set


def convert(
    source: Source, out: str, options: Options, progress: Progress | None = None
) -> ConversionResult:
    """Convert a source into the folder `out`, or into a bucket (s3://bucket/folder).

    Raises UsageError if `out` is in use, SourceError for a bad sample unless it is skipped,
    StorageError for a disk that fails. Finished shards are then kept for `resume`, and the files
    that were in `out` before are unchanged.
    """
    if options.dry_run:
        return _dry_run(source, out, options, progress)
    if is_object(out):
        if options.append:
            with bucket_update(out) as update:
                done = _convert(source, update.folder, options, progress, update.uploads, update)
            return done.moved_to(out)
        folder = outgoing(out)
        if not (options.resume and os.path.exists(folder)):
            check_free(out, overwrite=options.overwrite)
        done = _convert(source, folder, options, progress, ShardUploads(out, folder))
        return deliver_result(done, folder, out, progress)
    return _convert(source, out, options, progress)


def _convert(
    source: Source,
    out: str,
    options: Options,
    progress: Progress | None,
    uploads: ShardUploads | None = None,
    update: BucketUpdate | None = None,
) -> ConversionResult:
    """Convert a source into a folder. uploads: receives the shards as they are finished.

    update: the set in a bucket that the folder stands for.
    """
    if source.root is not None and _lies_in(out, source.root):
        raise UsageError(
            f"{out} lies in {source.root}, which is being converted. Put the shards into another "
            f"folder."
        )
    transaction = OutputTransaction(
        out,
        overwrite=options.overwrite,
        resume=options.resume,
        update=options.append,
        shown=update.address if update is not None else None,
        publish=update.publish if update is not None else None,
    )
    if uploads is not None and not options.resume:
        uploads.clear()  # not before the transaction removed the shards of an earlier run
    if transaction.is_complete:
        return _compared(out, source, options, progress)
    try:
        former = _set_in(out) if options.append else None
        if former is not None and _was_completed(transaction, source, options):
            transaction.leave()
            return appended_result(former)
        was_begun = bool(transaction.read_call())
        check_call(transaction, call_of(source, options, former))
        with collector_paused() if isinstance(source, Listing) else nullcontext():
            work = Packer(source, transaction, options, progress, former=former, uploads=uploads)
            return work.run(may_be_done=options.resume and not was_begun)
    except BaseException:
        transaction.leave()
        raise


def _dry_run(
    source: Source, out: str, options: Options, progress: Progress | None
) -> ConversionResult:
    """Return the result that a conversion would have, without writing anything.

    Files are not read: samples that would be skipped when they are read are counted as packed, and
    the sizes are those before images are re-encoded.
    """
    former = None
    if options.append:
        former = _set_in(out)
    elif not (options.overwrite or options.resume):
        if is_object(out):
            check_free(out, overwrite=False)
        elif os.path.isdir(out) and set(os.listdir(out)) - {SKIPPED_NAME}:
            raise UsageError(
                f"{out} is not empty. Choose an empty folder, or replace its "
                f"shards with overwrite=True, or add to them with append=True."
            )
    return Packer(source, None, options, progress, former=former, write=False).planned(out)


def _set_in(out: str) -> Index:
    """Return the index of the finished set in a folder. Raises UsageError if there is none."""
    path = os.path.join(out, INDEX_NAME)
    if not is_object(out) and not os.path.exists(path):
        raise UsageError(
            f"{out} holds no finished set of shards with an index. Name the folder of one."
        )
    return check_sizes(load(path))


def _was_completed(transaction: OutputTransaction, source: Source, options: Options) -> bool:
    """Return whether the update that was completed just now is this append."""
    former = transaction.completed_update
    if "append" not in former:
        return False
    call = call_of(source, options)
    return not differences(former, {**call, "append": former["append"]})


def _compared(
    out: str, source: Source, options: Options, progress: Progress | None
) -> ConversionResult:
    """Return the result of the finished conversion in `out` if this call would make the same.

    The source is read and its images are encoded, but nothing is written. Raises UsageError with
    the difference, ShardError if a shard is missing or was cut.
    """
    index = check_sizes(load(os.path.join(out, INDEX_NAME)))
    differing = differences(index.info, call_of(source, options))
    if not differing:
        folder = os.path.join(out, _COMPARISON)
        transaction = OutputTransaction(folder, overwrite=True, resume=False)
        try:
            fresh = replace(options, resume=False)
            work = Packer(source, transaction, fresh, progress, write=False)
            differing = first_difference(index, work.run().index)
        except SourceError as error:  # such as a bad sample, or no samples
            differing = [str(error).rstrip(".")]
        finally:
            transaction.clear()
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed comparison
    if differing:
        hint = "Choose another folder, or replace it with overwrite=True."
        raise other_conversion(out, differing, hint)
    return read_result(out, index)


def _lies_in(path: str, folder: str) -> bool:
    real, root = os.path.realpath(path), os.path.realpath(folder)
    return real == root or real.startswith(os.path.join(root, ""))
