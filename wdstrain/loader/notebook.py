"""A loader as an HTML table, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wdstrain.decode.fields import Field
from wdstrain.loader.planning import EpochPlans
from wdstrain.report import pages


def loader_card(
    plans: EpochPlans,
    rank: int,
    contents: Mapping[str, Field] | str | None,
    state: Mapping[str, object],
    report: Mapping[str, Any],
) -> str:
    """Return what a loader reads, what its batches hold, and where it is, as HTML.

    contents: the fields, or what a batch holds instead, in words; None: bytes.
    state: further rows, by name. report: of the newest epoch.
    """
    index, plan = plans.index, plans.plan(0)
    size = sum(shard.bytes for shard in index.shards)
    left_out = f", {plan.left_out} samples left out" if plan.left_out else ""
    rows = {
        "samples": f"{len(index)} in {len(index.shards)} shards, {size / 1e6:.1f} MB",
        "batches": f"{plan.steps} of {plan.batch_size} in an epoch{left_out}",
    }
    if isinstance(contents, Mapping):
        for name, field in contents.items():
            rows[f"batch[{name!r}]"] = _describe(field, plan.batch_size)
    else:
        rows["batch"] = contents or f"bytes of {', '.join(index.fields)}"
    rows["rank"] = f"{rank} of {plan.global_batch // plan.batch_size}"
    rows["order"] = "as in the shards"
    if plan.shuffle:
        rows["order"] = (
            f"shuffled by seed {plan.seed} within {plan.window} samples; the buffer holds about "
            f"{plans.buffered_megabytes(rank):.1f} MB"
        )
    rows |= {name: str(value) for name, value in state.items()}
    if report["batches"]:
        rows["verdict"] = report["verdict"]
    if report["bad"]:
        rows["bad samples"] = str(report["bad"])
    return pages.fragment("Loader", pages.table(rows))


def _describe(field: Field, batch_size: int) -> str:
    """Return the type and shape of a field in a batch, and the names that it is read from."""
    example = field.example
    if example is None:
        return f"a list, from {', '.join(field.names)}"
    shape = (example.shape[-1], *example.shape[:-1]) if example.channels_last else example.shape
    return f"{example.dtype}{[batch_size, *shape]}, from {', '.join(field.names)}"
