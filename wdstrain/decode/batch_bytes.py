"""Access to the encoded values of one batch in the memory of the reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, repeat

from wdstrain.decode.jpeg_batch import EncodedImages
from wdstrain.decode.task import BadSample, Task
from wdstrain.memory import Memory


class BatchBytes:
    """Encoded values of the batch of one task.

    Samples mostly have the same fields in the same order. Their members are then found by slicing,
    without a loop over samples.
    """

    def __init__(self, task: Task, arena: Memory, field_names: tuple[str, ...]) -> None:
        """field_names: names of the index's fields, by field number."""
        self._task, self._members, self._arena = task, task.members, arena
        self._names = field_names
        self._step = len(task.members.common_fields)  # members of each sample; 0: they differ

    def __len__(self) -> int:
        return len(self._task.ids)

    def columns(self) -> dict[str, list[bytes | None]]:
        """Return copies of all values by field, None where a sample lacks the field."""
        columns: dict[str, list[bytes | None]] = {name: [None] * len(self) for name in self._names}
        for row, sample in enumerate(self.samples()):
            for name, value in sample.items():
                columns[name][row] = bytes(value)
        return columns

    def samples(self) -> Iterator[dict[str, memoryview]]:
        """Yield the values of each sample by field."""
        views, field = self._views(), self._members.field.tolist()
        for start, stop in pairwise(self._members.first.tolist()):
            yield {self._names[field[m]]: views[m] for m in range(start, stop)}

    def values(self, names: tuple[str, ...]) -> Iterable[tuple[str, memoryview | None]]:
        """Return (field, value) for each sample: the first of these fields that the sample has.

        ("", None) for a sample that has none of them.
        """
        if not self._step:
            return [
                next(((name, sample[name]) for name in names if name in sample), ("", None))
                for sample in self.samples()
            ]
        position = self._position(names)
        if position is None:
            return repeat(("", None), len(self))
        name = self._names[self._members.common_fields[position]]
        return zip(repeat(name), self._views(position), strict=False)

    def images(self, names: tuple[str, ...]) -> EncodedImages | None:
        """Return the addresses of the values that `values` returns; None if samples differ.

        Also None if a value is beyond the arena: offsets may come from a hostile index file.
        """
        position = self._position(names)
        if position is None:
            return None
        start = self._members.offset[position :: self._step]
        size = self._members.size[position :: self._step]
        if (start < 0).any() or (size < 0).any() or (start > self._arena.size - size).any():
            return None
        return EncodedImages(start + self._arena.address, size)

    def bad_samples(self) -> dict[int, BadSample]:
        """Return, by row, the samples whose bytes cannot be used."""
        return {row: BadSample(row, *why) for row, why in sorted(self._task.bad.items())}

    def _views(self, position: int | None = None) -> list[memoryview]:
        """Return the members as views; with `position`, that member of each sample alone."""
        kept = slice(position, None, None if position is None else self._step)
        offset, size = self._members.offset[kept], self._members.size[kept]
        view = self._arena.view
        stop = (offset + size).tolist()
        return [view[start:end] for start, end in zip(offset.tolist(), stop, strict=True)]

    def _position(self, names: tuple[str, ...]) -> int | None:
        """Return the position of the first of these fields among the common fields, or None."""
        fields = self._members.common_fields
        positions = {self._names[field]: position for position, field in enumerate(fields)}
        return next((positions[name] for name in names if name in positions), None)
