"""Tasks of decoders: where the members of the samples of a batch lie in memory, as integers."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from wdstrain.decode.task import Members, Task
from wdstrain.reader.run import ReadBatch
from wdstrain.shards.index import Index


class TaskBuilder:
    """Builds tasks for the samples of an index. needed_fields: of the decoders; None: all."""

    def __init__(
        self, index: Index, needed_fields: Collection[str] | None, *, with_keys: bool
    ) -> None:
        """with_keys: decoders need the keys of samples."""
        self._index, self._with_keys, self.needed_fields = index, with_keys, needed_fields

    def task(self, batch: ReadBatch, slot: int) -> Task:
        """Return the task of a batch. slot: that its decoder fills."""
        table, ids = self._index.offsets, batch.ids
        members = table.members_of(ids, self.needed_fields)
        each, common = int(members.first[1]), tuple[int, ...]()
        if each and (np.diff(members.first) == each).all():
            by_sample = members.field.reshape(-1, each)
            if (by_sample == by_sample[0]).all():
                common = tuple(by_sample[0].tolist())
        begin = members.offset + (batch.offset - table.start[ids])[members.row]
        return Task(
            batch.number,
            batch.epoch,
            slot,
            ids,
            Members(members.first, members.field, begin, members.size, common),
            tuple(self._index.keys(ids)) if self._with_keys else (),
            batch.bad,
            batch.rng_ids,
        )
