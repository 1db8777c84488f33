"""Page-locked (pinned) memory, from which a CUDA device copies asynchronously.

Shared memory that already exists is locked in place (`cudaHostRegister`), so batches need no copy
into pinned memory of torch. Lock it after the worker processes have started. They write into the
same pages and need not know of the lock.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Any

import torch

from wdstrain.memory.shared import Memory


class PageLock:
    """Keeps a memory page-locked while this object exists."""

    def __init__(self, memory: Memory) -> None:
        """Raises OSError if CUDA refuses to lock the memory."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error_code = int(cudart.cudaHostRegister(memory.address, memory.size, 0))
        if error_code:
            with suppress(RuntimeError):  # clears the error; the next call would raise it
                torch.zeros(1, device="cuda")
            raise OSError(
                f"{memory.size / 1e6:.0f} MB could not be page-locked (CUDA error {error_code})"
            )
        # the finalizer refers to the map: pages must stay mapped until they are unlocked
        weakref.finalize(
            self, _unlock, cudart, memory.address, os.getpid(), memory.map
        ).atexit = False


def _unlock(cudart: Any, address: int, owner: int, _: Any) -> None:
    """Unlock the pages, unless this is a forked child: the lock belongs to the process `owner`."""
    if os.getpid() == owner:
        cudart.cudaHostUnregister(address)
