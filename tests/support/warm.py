"""Commands and snippets of the guides in processes that begin with all modules imported.

An import of torch, torchvision and the metrics takes about five seconds, and the guides have a
hundred commands. So one process imports them once and forks for each command. The child runs the
program itself, with the folder, environment, input and output of its caller. The shell finds it as
`wdstrain`, and snippets as `snippet FILE`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from wdstrain.cli import main

NAMES = ("wdstrain", "snippet")
# Imported before the first call. pyarrow imports pandas when it makes an array.
IMPORTED: tuple[str, ...] = ("h5py", "pandas", "pyarrow.csv", "pyarrow.parquet", "torchmetrics")
IMPORTED += ("torch.utils.tensorboard", "torchvision.transforms.v2", "wdstrain.conversion.api")
IMPORTED += tuple(f"wdstrain.inspection.{name}" for name in ("plan", "info", "show", "verify"))
IMPORTED += ("wdstrain.training.train", "wdstrain.training.evaluate", "wdstrain.tuning.bench")
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"!"], [0, 1, 2])
    server.sendall(json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    status = server.recv(16)
sys.exit(int(status))
"""


@contextlib.contextmanager
def warm(folder: Path) -> Iterator[Path]:
    """Yield a folder for the front of PATH, with `wdstrain` and `snippet`."""
    address = f"\0wdstrain-guides-{os.getpid()}-{os.urandom(8).hex()}"
    for name in NAMES:
        text = CLIENT.format(python=sys.executable, address=address, name=name)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    run = [sys.executable, "-m", "tests.support.warm", address[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"text": True, "start_new_session": True, "env": environment}
    server = subprocess.Popen(run, stdout=subprocess.PIPE, **options)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n"
        yield folder
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # with the processes that snippets left running
        server.wait()
        server.stdout.close()


def serve(address: str) -> None:
    """Fork for each call, and send the exit status to the caller."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the system
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        print("ready", flush=True)
        while True:
            caller, _ = listener.accept()
            _, descriptors, _, _ = socket.recv_fds(caller, 1, 3)
            with caller.makefile("rb") as file:
                called = json.load(file)
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                child = os.fork()
                if child == 0:
                    caller.close()
                    for number, descriptor in enumerate(descriptors):
                        os.dup2(descriptor, number)
                        os.close(descriptor)
                    run(*called)
                caller.sendall(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
                os._exit(0)
            caller.close()
            for descriptor in descriptors:
                os.close(descriptor)


def run(name: str, words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    """Run the called program to its end."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, status = [name, *words], 0
    try:
        if name == "wdstrain":
            status = main(words)
        else:
            warnings.simplefilter("error")
            sys.argv, sys.path[0] = words, folder
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # exit without unloading modules:
    atexit._run_exitfuncs()  # torch's own exit takes seconds, because it copies every page
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
