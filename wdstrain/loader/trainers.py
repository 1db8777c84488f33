"""What training loops and trainers call of a loader beside iterating; a base of `Loader`.

Trainers look for the attributes of torch's DataLoader. A loader answers each so that none of them
skips batches or repeats them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import pyarrow as pa

from wdstrain.loader.epoch import LoaderState
from wdstrain.loader.recording import Recording
from wdstrain.runtime.options import integer
from wdstrain.shards.index import Index


class TrainerInterface:
    """The methods of a `Loader` for loops that others wrote, and for values that a loop records."""

    index: Index
    recording: Recording
    _state: LoaderState

    @property
    def sampler(self) -> TrainerInterface:
        """Return the loader: Lightning announces each epoch to the `set_epoch` of this attribute."""
        return self

    batch_sampler = sampler  # Lightning reads it if there is a sampler

    @property
    def dataset(self) -> NoReturn:
        """Raise AttributeError, for trainers that would skip batches by making a DataLoader anew."""
        raise AttributeError(
            "a Loader has no dataset: it continues at the batch that load_state_dict gives it. "
            "Hugging Face's Trainer needs ignore_data_skip=True besides."
        )

    def __getitem__(self, _: object) -> NoReturn:
        """Raise TypeError for torch's DataLoader, which would take samples of a map by number."""
        raise TypeError(
            "a Loader has no items: it gives batches in its order. Use it in place of a DataLoader: "
            "for batch in loader."
        )

    def set_epoch(self, number: int) -> None:
        """Make this the epoch of the next `for` loop.

        If a state was loaded whose position is in this epoch, the loop goes on from there.
        """
        self._state.set_epoch(integer("epoch", number, 0))

    def record(self, batch: Mapping[str, Any], /, **values: Any) -> None:
        """Keep values of the samples of the batch that was delivered last, such as their losses.

            loader.record(batch, loss=losses, right=predicted == batch["label"])

        Each value is a tensor on any device, an array or a list of one number per row. `recorded`
        returns them. Rows of padding, and rows whose sample was replaced or marked, are left out.
        Of a sample that occurs several times in an epoch the mean is kept, as float32. NaN and
        infinity are kept, but change no weight.

        With weights="recorded:loss", epoch 0 has each sample once. Each later epoch has as many
        samples, of weight 0.1 + 0.9 * s / mean(s). s is half of the value in the epoch before plus
        half of the former s; a sample without a finite value has the mean. Reading ahead stops at
        the end of an epoch; ranks share their values.

        Raises UsageError for another batch, values of another length, and names that no column of
        the index can have.
        """
        self.recording.record(
            self.index, self._state.delivered, self._state.stats.epoch, batch, values
        )

    def recorded(self) -> pa.Table:
        """Return the recorded values, a row for each sample that has any, in index order.

        The columns are "key", "epoch" (of the newest value), "times" (how often the sample was
        recorded in all), and the recorded ones. `wt.join` and `Index.join` take the table.
        With torch.distributed every rank must call this, and gets the values of all ranks.
        """
        return self.recording.table(self.index)
