"""Memory that processes share, and batch slots that are reused when no tensor refers to them."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

import pytest
import torch

from tests.conftest import quick_and_slow
from wdstrain.decode.batches import Layout, Slots
from wdstrain.decode.fields import Example
from wdstrain.errors import WdstrainError
from wdstrain.memory import Memory


def write(memory: Memory, at: int) -> None:
    memory.view[at] = at


@pytest.mark.parametrize("method", quick_and_slow(["fork", "spawn"], 1))
def test_memory_is_shared_with_processes_of_every_start_method(method: str) -> None:
    memory = Memory(100)
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=write, args=(memory, 42))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    assert memory.view[42] == 42
    process.close()


LAYOUT = Layout.of(
    {"image": Example((4, 5, 3), "uint8", channels_last=True), "label": Example((), "int64")}, 2
)


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
