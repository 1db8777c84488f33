"""Reused memory: samples stay in place until released, and released memory is reused."""

from __future__ import annotations

import gc
import multiprocessing

import numpy as np
import pytest
import torch

from tests.conftest import quick_and_slow
from wdstrain.decode.batch_slots import Layout, Slots
from wdstrain.decode.fields import Example
from wdstrain.errors import WdstrainError
from wdstrain.memory.arena import Arena
from wdstrain.memory.shared import Memory


def test_held_samples_do_not_overlap_and_memory_stays_bounded() -> None:
    """Buckets are filled in an interleaved order and released in turn."""
    rng = np.random.default_rng(0)
    arena = Arena(live=8 << 20, largest=200_000, near=8, farthest=4)
    held: dict[int, list[tuple[int, int]]] = {}
    most = 0
    for step in range(0, 4000, 20):
        buckets, sizes = step // 100 + rng.integers(0, 4, 20), rng.integers(1, 60_000, 20)
        offsets = arena.place(buckets, sizes)
        for bucket, offset, size in zip(
            buckets.tolist(), offsets.tolist(), sizes.tolist(), strict=True
        ):
            assert 0 <= offset <= offset + size <= arena.memory.size
            for others in held.values():
                assert all(offset + size <= a or b <= offset for a, b in others)
            held.setdefault(bucket, []).append((offset, offset + size))
        if step % 100 == 80:
            arena.release()
            held.pop(step // 100, None)
        most = max(most, arena.held)
    assert most < arena.memory.size
    for _ in held:
        arena.release()
    assert arena.held == 0


@pytest.mark.parametrize("seed", quick_and_slow(range(6), 3))
def test_late_samples_share_wider_buckets_and_are_not_released_early(seed: int) -> None:
    """Most samples are released soon, some much later. The memory sized for them is enough."""
    rng = np.random.default_rng(seed)
    near, farthest = int(rng.integers(2, 40)), int(rng.integers(1, 5000))
    each, size = int(rng.integers(1, 4)), 1000
    arena = Arena(
        live=(near + farthest) * 2 * (each + 1) * 1024 * 3 // 2,
        largest=size,
        near=near,
        farthest=farthest,
    )
    held: dict[int, set[int]] = {}
    for bucket in range(2 * farthest):
        late = [farthest] if rng.random() < 0.3 else list(rng.integers(0, farthest + 1, 1))
        due = np.array(
            [*(bucket + rng.integers(0, min(near, farthest + 1), each)), bucket + late[0]]
        )
        offsets = arena.place(due, np.full(len(due), size))
        assert not set(offsets.tolist()) & set().union(*held.values())
        for number, offset in zip(due.tolist(), offsets.tolist(), strict=True):
            held.setdefault(number, set()).add(offset)
        arena.release()
        held.pop(bucket, None)
    for _ in range(farthest * 17 + 17):
        arena.release()
    assert arena.held == 0


def test_a_full_arena_is_an_error() -> None:
    arena = Arena(live=1000, largest=100, near=1, farthest=0)
    with pytest.raises(WdstrainError, match="which is its limit"):
        arena.place(np.arange(1000), np.full(1000, 100))


def write(memory: Memory, at: int) -> None:
    memory.view[at] = at


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_memory_is_shared_with_processes_of_every_start_method(method: str) -> None:
    memory = Memory(100)
    process = multiprocessing.get_context(method).Process(target=write, args=(memory, 42))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert memory.view[42] == 42
    process.close()


LAYOUT = Layout.of(
    {"image": Example((4, 5, 3), "uint8", channels_last=True), "label": Example((), "int64")}, 2
)


def test_columns_of_a_slot_do_not_overlap() -> None:
    assert LAYOUT.size % 4096 == 0
    buffer = bytearray(2 * LAYOUT.size)
    arrays = LAYOUT.arrays(buffer, LAYOUT.size, 2)
    arrays["image"][...], arrays["label"][...] = 255, 0
    assert arrays["image"].shape == (2, 4, 5, 3)
    assert (LAYOUT.arrays(buffer, LAYOUT.size, 2)["image"] == 255).all()
    assert not any(buffer[: LAYOUT.size])


def test_a_slot_is_reused_when_its_last_tensor_is_freed() -> None:
    slots = Slots(LAYOUT, busy=1, spare=1)
    batch = slots.lease(slots.take(), 2)
    row = batch["image"][1, 0]
    del batch
    gc.collect()
    assert slots.take() == 1
    with pytest.raises(WdstrainError, match="all 2 slots for batches are in use"):
        slots.take()
    del row
    gc.collect()
    assert slots.take() == 0


def test_batches_beyond_the_spare_slots_are_copies() -> None:
    slots = Slots(LAYOUT, busy=1, spare=2)
    kept = []
    for number in range(5):
        slot = slots.take()
        LAYOUT.arrays(slots.memory.view, slot * LAYOUT.size, 2)["label"][...] = number
        kept.append(slots.lease(slot, 2))
    assert [batch["label"].tolist() for batch in kept] == [[n, n] for n in range(5)]
    assert slots.copies == 3
    assert kept[0]["image"].shape == kept[4]["image"].shape == (2, 3, 4, 5)
    assert kept[4]["image"].is_contiguous(memory_format=torch.channels_last)
