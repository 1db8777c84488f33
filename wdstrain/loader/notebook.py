"""Objects of the package as small tables, for a notebook that shows what a cell ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wdstrain.decode.fields import Field
from wdstrain.order.plan import Order
from wdstrain.report import charts
from wdstrain.shards.index import Index


def loader_card(
    index: Index,
    plan: Order,
    rank: int,
    what: Mapping[str, Field] | str | None,
    held: float,
    doing: Mapping[str, object],
    report: Mapping[str, Any],
) -> str:
    """A loader: what it reads, what its batches are, where it is. what: its fields, or what is in their place; held: MB of its buffer."""
    size = sum(shard.bytes for shard in index.shards)
    ranks = plan.global_batch // plan.batch_size
    rows = {
        "samples": f"{len(index)} in {len(index.shards)} shards, {size / 1e6:.1f} MB",
        "batches": f"{plan.steps} of {plan.batch_size} in an epoch"
        + (f", {plan.left_out} samples left out" if plan.left_out else ""),
    }
    if isinstance(what, Mapping):
        rows |= {f"batch[{name!r}]": _said(field, plan.batch_size) for name, field in what.items()}
    else:
        rows["batch"] = what or f"bytes of {', '.join(index.fields)}"
    rows["rank"] = f"{rank} of {ranks}"
    rows["order"] = (
        f"shuffled by seed {plan.seed} within {plan.window} samples, about {held:.1f} MB are held"
        if plan.shuffle
        else "as in the shards"
    )
    rows |= {name: str(value) for name, value in doing.items()}
    if report["batches"]:
        rows["verdict"] = report["verdict"]
        rows |= {"bad samples": str(report["bad"])} if report["bad"] else {}
    return charts.fragment("Loader", charts.table(rows))


def _said(field: Field, rows: int) -> str:
    """What a field is in a batch, and what it is read from."""
    example = field.example
    if example is None:
        return f"a list, from {', '.join(field.names)}"
    shape = (example.shape[-1], *example.shape[:-1]) if example.channels_last else example.shape
    return f"{example.dtype}{[rows, *shape]}, from {', '.join(field.names)}"
