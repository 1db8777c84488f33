"""Results of `wt.plan_epoch` as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from wdstrain.inspection.epoch_preview.shuffle_quality import ClassMix, Neighbors
from wdstrain.inspection.epoch_preview.simulate import RankShare
from wdstrain.order.order import Tail
from wdstrain.runtime.cached import cached_property


@dataclass(frozen=True)
class BufferQuality:
    """How well a shuffle buffer mixes, and what it holds on a rank, on average.

    shuffle: False for the order on disk. neighbors, classes: None if they cannot be measured.
    """

    buffer: int
    shuffle: bool
    held_samples: float
    held_bytes: float
    neighbors: Neighbors | None
    classes: ClassMix | None

    @property
    def separates_neighbors(self) -> bool:
        """Whether neighbors on disk are rarely in one batch."""
        return self.neighbors is None or self.neighbors.nearest <= self.neighbors.limit

    @property
    def mixes_classes(self) -> bool:
        """Whether batches are nearly as even in their classes as those of a random order."""
        return self.classes is None or self.classes.design_effect <= self.classes.limit

    @property
    def is_good(self) -> bool:
        return self.separates_neighbors and self.mixes_classes


@dataclass(frozen=True)
class Preview:
    """What an epoch will do.

    ranks: what each rank does. exactly_once: every sample that is not left out is read and delivered
    once. steps_measured: steps for which memory was computed. quality: of the chosen order; sizes:
    of all tried buffers, the smallest first. was_shuffled: the conversion shuffled the shards.
    label: whose classes were measured; labels_read: values that were read from shards, because the
    index has no column of them; why_no_classes: why no classes were measured.
    """

    samples: int
    shards: int
    bytes: int
    is_remote: bool
    batch_size: int
    world_size: int
    lanes: int
    shuffle: bool
    shuffle_buffer: int
    seed: int
    epoch: int
    tail: Tail
    steps: int
    left_out: int
    exactly_once: bool
    steps_measured: int
    ranks: tuple[RankShare, ...]
    quality: BufferQuality
    sizes: tuple[BufferQuality, ...]
    was_shuffled: bool
    label: str | None
    labels_read: int
    why_no_classes: str

    @cached_property
    def smallest_good(self) -> BufferQuality | None:
        """The smallest buffer that mixes well; None if none of the tried ones does."""
        return next((one for one in self.sizes if one.shuffle and one.is_good), None)

    @property
    def is_good(self) -> bool:
        return self.quality.is_good
