"""The example notebook in a real kernel; interrupts, cells that run twice, lambdas in notebooks."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import wdstrain as wt
from tests.conftest import ROOT, write_shards
from tests.support.kernels import Kernel, Shown, kernel

EXAMPLES = ROOT / "scripts" / "examples"
SOURCE, NOTEBOOK = EXAMPLES / "notebook.py", EXAMPLES / "notebook.ipynb"

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the kernel's own client


def cells() -> list[tuple[str, bool]]:
    """Return (text, is code) of each cell of the notebook's source."""
    make = runpy.run_path(str(EXAMPLES / "make_notebook.py"))
    return [(text, kind == "code") for kind, text in make["cells"](SOURCE.read_text())]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook beside three shards; `make(...)` makes a loader, `alive()` lists its threads."""
    home = tmp_path_factory.mktemp("notebook")
    write_shards(home / "s", [70, 130, 10])
    with kernel(home) as running:
        running.run(
            "import wdstrain as wt, gc, multiprocessing, os, subprocess, sys, threading, time\n"
            "wt.index('s')\n"
            "def make(**options):\n"
            "    given = {'transform': lambda sample: {'n': int(sample['cls'])}, 'batch_size': 2, **options}\n"
            "    return wt.Loader('s', multiprocessing_context='fork', **given)\n"
            "def alive():\n"
            "    gc.collect()\n"
            "    return sorted(t.name for t in threading.enumerate() if t.name.startswith('wdstrain')) + [\n"
            "        child.pid for child in multiprocessing.active_children()]\n"
        )
        yield running


def test_the_notebook_has_the_cells_of_its_source_and_outputs_with_images() -> None:
    """After a change of notebook.py run: python scripts/examples/make_notebook.py"""
    text = NOTEBOOK.read_text()
    written = json.loads(text)["cells"]
    actual = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in written]
    assert actual == cells()
    assert text.count('"image/png"') > 4
    assert len(text) < 500_000
    assert not re.search(r"/(tmp|root|home|work|usr)/", text)
    outputs = [output for cell in written for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    code = [text for text, is_code in actual if is_code]
    assert code[0] == '%pip install --quiet "wdstrain[demo]"'
    assert max(len(line) for text in code for line in text.splitlines()) <= 100


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_cell_of_the_notebook_runs_and_displays_output(tmp_path: Path) -> None:
    shown: dict[str, Shown] = {}
    with kernel(tmp_path) as running:
        for text, is_code in cells():
            if is_code and not text.startswith("%pip"):
                shown[text] = running.run(text, seconds=240)
                assert not shown[text].err, f"{text}\n{shown[text].err}"

    def of(part: str) -> Shown:
        return next(output for text, output in shown.items() if part in text)

    for part in ("wt.peek(train, 5)", 'order="classes"', "make_grid(batch", "{wrong[:5]}"):
        (bundle,) = of(part).displays
        assert bundle["image/png"], part
        assert bundle["text/plain"].strip(), part
    assert re.match("loop bound|input bound|no bottleneck", of("loader.report()").out)
    tables = ("display(index)", "display(loader)", "wt.info(shards)", "wt.plan_epoch(", "wt.bench(")
    for part in tables:
        *_, bundle = of(part).displays  # behind the progress of those that read
        assert "samples" in bundle["text/plain"], part
    for part in ('plot("Loss"', 'plot("Accuracy"'):
        for output in of(part).displays:
            assert "<svg" in output.get("text/html", "") or "image/png" in output
    for html in (b.get("text/html", "") for cell in shown.values() for b in cell.displays):
        assert not re.search("<script|http|<iframe", html)  # it needs no network and runs nothing
    assert of("other.close()").out.endswith("the same samples: True\nthe same pixels: True\n")
    assert of("processes.close()").out == "the same samples: True\nthe same pixels: True\n"
    assert float(re.findall(r"'accuracy': ([\d.]+)", of("wt.evaluate").out)[0]) > 0.8
    # Progress is one output of plain text: few updates, and empty at the end.
    trained = of("wt.train(")
    (first,) = trained.displays
    texts = [first, *trained.updates]
    assert all(set(bundle) == {"text/plain"} for bundle in texts)
    assert not re.search("[\x1b\n]", "".join(bundle["text/plain"] for bundle in texts))
    assert len(texts) < 3 * 37
    assert texts[-1] == {"text/plain": ""}
    assert "\x1b" not in trained.out


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cell_is_interrupted_and_run_again(opened: Kernel, workers: int) -> None:
    """The interrupt comes in the loop or before the first batch."""
    opened.run(f"loader = make(num_workers={workers})")
    for code in (
        # One print: an interrupt within a print can leave the lock of the kernel's stream locked.
        "begun = False\nwhile True:\n    for batch in loader:\n        if not begun:\n"
        "            begun = True\n            print('begun', flush=True)\n        time.sleep(0.005)",
        "print('begun', flush=True)\nwhile True: list(loader)",
    ):
        opened.interrupted(code)
        count = "print(sum(len(batch['n']) for batch in loader.epoch(0)))"
        assert opened.run(count).out == "210\n"
    live = json.loads(opened.run("import json\nprint(json.dumps(alive()))").out)
    assert len([entry for entry in live if isinstance(entry, int)]) == workers
    # None if the last interrupt came before the loop: an epoch requested twice reads nothing ahead.
    assert live.count("wdstrain-fetch-0") <= 1
    # The notebook keeps the last traceback. If the interrupt came in `iter(loader)` or
    # `len(loader)`, one of its frames refers to the loader itself.
    opened.run("1 / 0", fails=True)
    opened.run("del loader, batch")
    assert opened.run("print(alive())").out == "[]\n"


def test_a_pass_that_ended_with_an_error_cannot_continue(shards: Path) -> None:
    loader = wt.Loader(shards, {"n": wt.number("txt")}, batch_size=2)
    batches = iter(loader)
    with pytest.raises(wt.SampleError, match="sample"):
        next(batches)
    with pytest.raises(wt.WdstrainError, match="ended with an error"):
        next(batches)


CLASSES = """
class Half:
    names, example = ("cls",), None
    def read(self, name, data, out, draws):
        return int(bytes(data)) / 2

def whole(sample): return {"half": int(sample["cls"])}

def tried(method, workers, **given):
    begun = set(multiprocessing.active_children())
    with wt.Loader("s", batch_size=2, num_workers=workers, multiprocessing_context=method, **given) as loader:
        try:
            return sum(float(value) for batch in loader for value in batch["half"]) > 0
        except wt.WdstrainError as error:
            return f"{error} {set(multiprocessing.active_children()) == begun}"
"""

NOT_SENT = "fields and functions cannot be sent to worker processes, which "
PARTS = {
    "transform=lambda sample: {'half': int(sample['cls'])}": NOT_SENT,
    "transform=whole": "a worker process of the loader died",
    "fields={'label': wt.label(), 'half': Half()}": "a worker process of the loader died",
}


@pytest.mark.parametrize("part", PARTS)
def test_notebook_objects_work_in_forked_workers_or_are_an_error(opened: Kernel, part: str) -> None:
    """Threads and forked workers can use them; other workers end, and leave no process."""
    opened.run(CLASSES)
    used = opened.run(f"print(tried(None, 0, {part}), tried('fork', 2, {part}))")
    assert used.out == "True True\n"
    for method in ("spawn", "forkserver"):
        shown = opened.run(f"print(tried({method!r}, 2, {part}))")
        assert shown.out.startswith(PARTS[part])
        assert shown.out.endswith(" True\n")
        if PARTS[part] == NOT_SENT:
            assert f"which {method} starts: Can't pickle" in shown.out
            assert "Use num_workers=0, a function or class at the top of a .py file" in shown.out


PROGRAM = """
import sys
import wdstrain as wt

class Half:
    names, example = ("cls",), None
    def read(self, name, data, out, draws):
        return int(bytes(data)) / 2

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with wt.Loader(sys.argv[1], {"half": Half()}, batch_size=7, num_workers=1, multiprocessing_context=method) as loader:
            print(sum(value for batch in loader for value in batch["half"]))
"""


@pytest.mark.slow
def test_a_script_can_send_its_own_classes_to_workers(tmp_path: Path, shards: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "program", str(shards)]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "105.0\n105.0\n"), done.stderr


def test_an_open_file_is_named_as_not_picklable(shards: Path) -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
    with (
        open(os.devnull) as file,
        wt.Loader(shards, transform=partial(print, file=file), batch_size=7, **options) as loader,
        pytest.raises(wt.UsageError, match=r"functions cannot .* spawn starts: .*TextIOWrapper"),
    ):
        next(iter(loader))
