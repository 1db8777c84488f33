"""What is known of an epoch before it is read, as plain values, and what of it is good enough.

Good enough is a choice, and it is made here alone. Batches that are a tenth less even in their classes than ideal ones cost what
a batch a tenth smaller does. Neighbours on disk may be frames of one film: of 16, one in ten batches may have one more than chance
puts there. In a small set chance puts more there, and its samples meet often anyway: twice as many are allowed.
"""

from __future__ import annotations

from dataclasses import dataclass

from wdstrain.foresight.itinerary import RankShare
from wdstrain.foresight.shuffling import ClassMix, Neighbours
from wdstrain.order.plan import Tail
from wdstrain.runtime.cached import cached_property

GOOD_EFFECT = 1.1  # a design effect up to this is good enough: batches as even as ideal ones that are a tenth smaller
_MOST_ERROR = 0.5  # of a design effect that excuses it
GOOD_NEIGHBOURS = 0.1  # of the nearest samples on disk, so many more than ideally may share a batch, or twice the ideal number


def most_neighbours(ideal: float) -> float:
    """How many of the nearest samples on disk may share a batch where ideally so many do: of a small set, twice as many."""
    return ideal + max(GOOD_NEIGHBOURS, ideal)


def parts_neighbours(found: Neighbours | None) -> bool:
    """Whether so few of them share a batch; where no sample has a neighbour, none does."""
    return found is None or found.nearest <= most_neighbours(found.nearest_ideal)


@dataclass(frozen=True)
class Mix:
    """How well one size of the shuffle buffer mixes, and what it holds on a rank. shuffle: False is the order on disk."""

    buffer: int
    shuffle: bool
    held_samples: float
    held_bytes: float
    neighbours: Neighbours | None
    classes: ClassMix | None

    @property
    def parts_neighbours(self) -> bool:
        """Whether neighbours on disk seldom meet in a batch, or hardly more often than in an ideal order."""
        return parts_neighbours(self.neighbours)

    @property
    def evens_classes(self) -> bool:
        """Whether batches are as even in their classes as an ideal order's, or not told apart from that by one standard error."""
        return self.classes is None or self.classes.design_effect <= GOOD_EFFECT + min(
            self.classes.error or 0.0, _MOST_ERROR
        )

    @property
    def is_good(self) -> bool:
        return self.parts_neighbours and self.evens_classes


@dataclass(frozen=True)
class Prospect:
    """What an epoch would do.

    ranks: what each of them does. exactly_once: whether every sample that is not left out is read and delivered once, as counted.
    steps_looked_at: for what is held, out of `steps`. now: how well the order mixes; sizes: the same for other buffers, the
    smallest first, and for this one. packed_at_random: as the index says of its conversion. label: whose classes were looked at,
    and labels_read how many; why_no_classes: why none.
    """

    samples: int
    shards: int
    bytes: int
    on_a_server: bool
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
    steps_looked_at: int
    epochs_mixed: int
    ranks: tuple[RankShare, ...]
    now: Mix
    sizes: tuple[Mix, ...]
    packed_at_random: bool
    label: str | None
    labels_read: int
    why_no_classes: str

    @cached_property
    def enough(self) -> Mix | None:
        """The smallest buffer that is good enough, if there is one."""
        return next((mix for mix in self.sizes if mix.shuffle and mix.is_good), None)

    @property
    def is_good(self) -> bool:
        return self.now.is_good
