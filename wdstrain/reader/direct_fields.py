"""Fields whose arrays are read straight into their batch.

Conditions: local shards, no padding, the same fields in the same order in every sample, one size for
all arrays of the field, and the C library. Otherwise arrays go through the arena.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from isal.isal_zlib import crc32

from wdstrain.decode.batch_slots import Layout, Slots
from wdstrain.decode.fields import Field, NumpyArray
from wdstrain.errors import WdstrainError
from wdstrain.native import kernels
from wdstrain.order.order import Order
from wdstrain.order.plan import Plan, has_padding
from wdstrain.shards.index import Index
from wdstrain.shards.offsets import Ints
from wdstrain.storage.local import LocalFile, open_source
from wdstrain.storage.remote import is_remote

_LEAST = 4096  # bytes; copying a smaller array is cheaper than a segment of its own


@dataclass(frozen=True)
class DirectField:
    """A field whose arrays are read straight into the batch.

    field_name: its name in the index. member: its position among the members of a sample.
    head: bytes of the .npy header. row: bytes of the numbers. column: offset of its column in a
    slot.
    """

    field: NumpyArray
    field_name: str
    member: int
    head: int
    row: int
    column: int


class DirectFields:
    """The direct fields of a loader, in the order of their members in a sample; there may be none.

    bytes: bytes of a sample that go into the batch; all others go to the arena.
    """

    def __init__(self, index: Index, fields: Mapping[str, DirectField], slots: Slots) -> None:
        self._index, self._slots = index, slots
        self.fields = list(fields.values())
        self.bytes = sum(direct.row for direct in self.fields)

    def bytes_before(self, positions: Ints) -> Ints:
        """Return the bytes before each member of a sample that are not in the arena. int64[n]

        positions: of the members in their samples, int64[n].
        """
        before = np.zeros_like(positions)
        for direct in self.fields:
            before += (positions > direct.member) * direct.row
        return before

    def arena_pieces(self, number: int, target: memoryview) -> list[memoryview]:
        """Return buffers for a scatter read of sample `number` that keeps only its arena bytes.

        target: memory for the arena bytes. The arrays go to buffers that are discarded.
        """
        table = self._index.offsets
        pieces, offset = list[memoryview](), int(table.start[number])
        for direct in self.fields:
            member = int(table.member_first[number]) + direct.member
            numbers = int(table.member_offset[member]) + direct.head
            pieces += [target[: numbers - offset], memoryview(bytearray(direct.row))]
            target, offset = target[numbers - offset :], numbers + direct.row
        return [*pieces, target]

    def reread(self, number: int, row: int, slot: int) -> str | None:
        """Read sample `number` again and let its fields decode its arrays into a row of a slot.

        Returns None, or the reason why the sample is unreadable.
        """
        if not self.fields:
            return None
        table = self._index.offsets
        shard = self._index.shard_with(number)
        start = int(table.start[number])
        memory = memoryview(bytearray(int(table.stop[number]) - start))
        try:
            with open_source(shard.path, shard.bytes, self._index.expected_state(shard)) as source:
                source.read_into([memory], start)
        except WdstrainError as error:
            return f"it cannot be read ({str(error).rstrip('.')})"
        for direct in self.fields:
            member = int(table.member_first[number]) + direct.member
            offset = int(table.member_offset[member]) - start
            crc = int(table.member_crc[member]) if len(table.member_crc) else 0
            data = memory[offset : offset + direct.head + direct.row]
            reason = self._decode(direct, data, crc, row, slot)
            if reason is not None:
                return reason
        return None

    def _decode(
        self, direct: DirectField, data: memoryview, crc: int, row: int, slot: int
    ) -> str | None:
        """Decode an array into a row of a slot. Returns the reason if the sample is bad."""
        if crc and crc32(data) != crc:
            return (
                f"the bytes of {direct.field_name} are not those that were packed (crc32), "
                f"also when they are read again"
            )
        layout = self._slots.layout
        columns = layout.arrays(self._slots.memory.view, slot * layout.size, layout.rows)
        by_offset = {offset: name for name, (_, offset) in layout.columns.items()}
        try:
            target = columns[by_offset[direct.column]][row, ...]
            direct.field.read(direct.field_name, data, target, np.zeros(0))
        except Exception as error:  # as in the decoder: the sample is bad, the loader goes on
            return f"{direct.field_name}: {error}"
        return None


def find_direct_fields(
    index: Index, fields: Mapping[str, Field] | None, layout: Layout, plan: Order
) -> dict[str, DirectField]:
    """Return the fields whose arrays can be read straight into the batch, by name.

    They are in the order of their members in a sample. {} if a condition of this module fails.
    """
    if fields is None or not isinstance(plan, Plan) or has_padding(plan):
        return {}
    if kernels.library is None or any(is_remote(shard.path) for shard in index.shards):
        return {}
    table = index.offsets
    count = int(table.member_first[1] - table.member_first[0])
    if not count or (np.diff(table.member_first) != count).any():
        return {}
    kinds = table.member_field.reshape(-1, count)
    if (kinds != kinds[0]).any():
        return {}
    found = dict[str, DirectField]()
    for name, field in fields.items():
        others = {other for key in fields.keys() - {name} for other in fields[key].names}
        column = layout.columns[name][1] if name in layout.columns else -1
        direct = _direct_field(index, field, others, column)
        if direct is not None:
            found[name] = direct
    # Slots are held for a window, so the direct columns must be at least half of a slot. Otherwise
    # the other columns would take much memory for little gain.
    if 2 * layout.rows * sum(field.row for field in found.values()) < layout.size:
        return {}
    if not _first_sample_fits(index, list(found.values())):
        return {}
    return dict(sorted(found.items(), key=lambda item: item[1].member))


def _direct_field(index: Index, field: Field, others: set[str], column: int) -> DirectField | None:
    """Return the direct field for a field of arrays of one size; None if it must go another way.

    others: names that other fields read; their bytes must be in the arena. column: its offset in a
    slot. All samples have the same fields.
    """
    table = index.offsets
    present = [name for name in field.names if name in index.fields]
    if type(field) is not NumpyArray or field.example is None or len(present) != 1:
        return None
    count = int(table.member_first[1] - table.member_first[0])
    kinds, sizes = table.member_field[:count], table.member_size.reshape(-1, count)
    members = np.flatnonzero(kinds == index.fields.index(present[0])).tolist()
    shape, dtype = field.example.shape, np.dtype(field.example.dtype)
    row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if len(members) != 1 or row < _LEAST or present[0] in others:
        return None
    size = int(sizes[0, members[0]])
    if size <= row or (sizes[:, members[0]] != size).any():
        return None
    return DirectField(field, present[0], members[0], size - row, row, column)


def _first_sample_fits(index: Index, fields: list[DirectField]) -> bool:
    """Return whether the arrays of the first sample have the byte and axis order of their fields.

    If they do not, the arrays of the other samples will not either.
    """
    table = index.offsets
    try:
        with LocalFile(index.shards[0].path) as source:
            for direct in fields:
                head = bytearray(direct.head)
                source.read_into([memoryview(head)], int(table.member_offset[direct.member]))
                if not direct.field.has_plain_layout(bytes(head)):
                    return False
    except WdstrainError:  # the reader meets the same error and raises or skips it
        return False
    return True
