"""A real notebook kernel for tests, which runs cells and returns their output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT


@dataclass
class Shown:
    """Output of a cell: texts by stream, and displayed bundles {MIME type: data}."""

    streams: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    displays: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)  # new versions of earlier displays
    error: str = ""  # "NameError: ..."

    @property
    def out(self) -> str:
        return self.streams["stdout"]

    @property
    def err(self) -> str:
        return self.streams["stderr"]


class Kernel:
    """A running kernel."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client

    def run(
        self,
        code: str,
        *,
        fails: bool = False,
        seconds: float = 60,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Shown:
        """Run a cell. fails: with an error. on_text: called with the printed text as it grows."""
        shown = Shown()

        def hook(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.streams[content["name"]] += content["text"]
                on_text(shown.streams[content["name"]])
            elif message["msg_type"] in ("display_data", "execute_result"):
                shown.displays.append(content["data"])
            elif message["msg_type"] == "update_display_data":
                shown.updates.append(content["data"])

        reply = self._client.execute_interactive(code, output_hook=hook, timeout=seconds)["content"]
        if reply["status"] == "error":
            shown.error = f"{reply['ename']}: {reply['evalue']}"
        assert bool(shown.error) == fails, f"{code}\n{shown}"
        return shown

    def interrupted(self, code: str, *, at: str = "begun") -> Shown:
        """Run a cell and interrupt it when it has printed this word."""
        calls: list[str] = []

        def interrupt(text: str) -> None:
            if at in text and not calls:
                calls.append(text)
                self._manager.interrupt_kernel()

        shown = self.run(code, fails=True, on_text=interrupt)
        assert shown.error.startswith("KeyboardInterrupt"), shown
        return shown


@contextmanager
def kernel(home: Path) -> Iterator[Kernel]:
    """Start a kernel that works in `home` and writes no files to the user's home folder."""
    jupyter_client = pytest.importorskip("jupyter_client", reason="jupyter-client is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    places = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
    with pytest.MonkeyPatch.context() as changed:
        for name in places:
            changed.setenv(name, str(home / name))
        changed.setenv("PYTHONPATH", str(ROOT))
        manager = jupyter_client.KernelManager(kernel_name="python3")
        manager.start_kernel(extra_arguments=["--quiet"], cwd=str(home))
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
