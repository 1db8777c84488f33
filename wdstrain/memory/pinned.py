"""Page-locked memory: a CUDA device copies from it by itself, beside its work and at the full speed of the bus.

Memory that exists already is locked where it is (`cudaHostRegister`), so batches need not be copied into memory of torch's own
first. It is done once, after worker processes were started: they write into the same pages and know nothing of it. The road not
taken is DataLoader's `pin_memory`, a thread that allocates and copies every batch once more.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Any

import torch

from wdstrain.memory.shared import Memory


class Locked:
    """Memory that is page-locked for as long as this is held."""

    def __init__(self, memory: Memory) -> None:
        """Raises OSError where the system does not allow it."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = int(cudart.cudaHostRegister(memory.address, memory.size, 0))
        if failed:
            with suppress(RuntimeError):  # CUDA would report it once more, of whatever is asked next
                torch.zeros(1, device="cuda")
            raise OSError(f"{memory.size / 1e6:.0f} MB could not be page-locked (CUDA error {failed})")
        # the map is among the arguments, so that it outlives its lock
        weakref.finalize(self, _unlock, cudart, memory.address, os.getpid(), memory.map).atexit = False


def _unlock(cudart: Any, address: int, owner: int, _: Any) -> None:
    if os.getpid() == owner:
        cudart.cudaHostUnregister(address)
