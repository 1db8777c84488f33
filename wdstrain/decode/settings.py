"""Settings of a decoder: how the samples of a loader become batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from wdstrain.decode.batch_slots import Layout
from wdstrain.decode.fields import Field

Transform = Callable[..., Any]  # sample -> example, or (sample, rng) -> example
Collate = Callable[[list[Any]], Mapping[str, Any]]  # examples of a batch, in order -> batch


@dataclass(frozen=True)
class DecoderSettings:
    """How the samples of a loader become batches. Sent to every worker process.

    field_names: names of the index's fields, by field number.
    layout: columns of a batch slot.
    fields: fields to decode, by name in the batch; None: with `transform`, or for plain bytes.
    transform: function of the user, instead of `fields`. takes_rng: it takes (sample, rng).
    collate_fn: makes a batch of the examples of the transform; None: torch's default_collate.
    on_error: "raise", "replace" or "mark" bad samples; see `wdstrain.decode.bad_samples.substitute`.
    seed: of the random numbers of each sample.
    """

    field_names: tuple[str, ...]
    layout: Layout
    fields: Mapping[str, Field] | None = None
    transform: Transform | None = None
    takes_rng: bool = False
    collate_fn: Collate | None = None
    on_error: str = "raise"
    seed: int = 0
