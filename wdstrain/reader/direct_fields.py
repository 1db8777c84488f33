"""Fields whose arrays can be read straight into their batch.

Conditions: local shards, tail="drop", the same fields in the same order in every sample, and one
size for all arrays of the field. Otherwise arrays go through the arena.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from wdstrain.decode.batch_slots import Layout
from wdstrain.decode.fields import Field, NumpyArray
from wdstrain.errors import WdstrainError
from wdstrain.order.plan import Order, Plan
from wdstrain.reader.slot_scatter import DirectField
from wdstrain.shards.index import Index
from wdstrain.storage.local import LocalFile
from wdstrain.storage.remote import is_remote

_LEAST = 4096  # bytes; copying a smaller array is cheaper than a segment of its own


def direct_fields(
    index: Index, fields: Mapping[str, Field] | None, layout: Layout, plan: Order
) -> dict[str, DirectField]:
    """Return the fields whose arrays can be read straight into the batch, by name.

    They are in the order of their members in a sample. {} if a condition of this module fails.
    """
    if fields is None or not isinstance(plan, Plan) or plan.tail != "drop":
        return {}
    if any(is_remote(shard.path) for shard in index.shards):
        return {}
    table = index.table
    count = int(table.member_first[1] - table.member_first[0])
    if not count or (np.diff(table.member_first) != count).any():
        return {}
    kinds = table.member_field.reshape(-1, count)
    if (kinds != kinds[0]).any():
        return {}
    sizes, direct = table.member_size.reshape(-1, count), dict[str, DirectField]()
    for name, field in fields.items():
        present = [field_name for field_name in field.names if field_name in index.fields]
        if type(field) is not NumpyArray or field.example is None or len(present) != 1:
            continue
        members = np.flatnonzero(kinds[0] == index.fields.index(present[0])).tolist()
        row = (
            int(np.prod(field.example.shape, dtype=np.int64))
            * np.dtype(field.example.dtype).itemsize
        )
        if (
            len(members) != 1
            or row < _LEAST
            or (sizes[:, members[0]] != sizes[0, members[0]]).any()
        ):
            continue
        head = int(sizes[0, members[0]]) - row
        shared = any(present[0] in other.names for key, other in fields.items() if key != name)
        if head > 0 and not shared:  # bytes that another field reads must be in the arena
            direct[name] = DirectField(
                field, present[0], members[0], head, row, layout.columns[name][1]
            )
    # Slots are held for a window, so the direct columns must be at least half of a slot. Otherwise
    # the other columns would take much memory for little gain.
    if 2 * layout.rows * sum(field.row for field in direct.values()) < layout.size:
        return {}
    if not _first_sample_fits(index, list(direct.values())):
        return {}
    return dict(sorted(direct.items(), key=lambda item: item[1].member))


def _first_sample_fits(index: Index, fields: list[DirectField]) -> bool:
    """Return whether the arrays of the first sample have the byte and axis order of their fields.

    If they do not, the arrays of the other samples will not either.
    """
    table = index.table
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
