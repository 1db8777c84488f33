"""The example notebook in a real kernel, and notebook use: interrupts, cells that run again, lambdas."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wdstrain as wt
from tests.conftest import ROOT, write_shards
from tests.support.kernels import Kernel, Shown, kernel

EXAMPLES = ROOT / "scripts" / "examples"
SOURCE, NOTEBOOK = EXAMPLES / "notebook.py", EXAMPLES / "notebook.ipynb"

pytestmark = pytest.mark.filterwarnings("ignore")  # of the kernel's own client


def cells() -> list[tuple[str, bool]]:
    """Return (text, whether it is code) of each cell of the notebook's source."""
    make = runpy.run_path(str(EXAMPLES / "make_notebook.py"))
    return [(text, kind == "code") for kind, text in make["cells"](SOURCE.read_text())]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook beside three shards in `s`; `make(...)` is a loader of them, `alive()` what runs for loaders."""
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
            "    return sorted(one.name for one in threading.enumerate() if one.name.startswith('wdstrain')) + [\n"
            "        child.pid for child in multiprocessing.active_children()]\n"
        )
        yield running


# --- the notebook itself ---------------------------------------------------------------------------------------------


def test_the_notebook_has_the_cells_of_its_source_and_outputs_with_images() -> None:
    """After a change of notebook.py: python scripts/examples/make_notebook.py"""
    text = NOTEBOOK.read_text()
    written = json.loads(text)["cells"]
    found = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in written]
    assert found == cells()
    assert text.count("data:image/png;base64,") > 20
    assert len(text) < 500_000
    assert not re.search(r"/(tmp|root|home|work|usr)/", text)
    outputs = [output for cell in written for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}


def test_the_notebook_begins_with_its_installation_and_explains_its_cells() -> None:
    found = cells()
    assert found[0][0].startswith("# ")
    code = [text for text, is_code in found if is_code]
    assert code[0] == '%pip install --quiet "wdstrain[demo]"'
    assert 15 <= len(code) <= 26
    assert len(found) - len(code) >= 15
    assert max(len(line) for text in code for line in text.splitlines()) <= 100


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_cell_of_the_notebook_runs_and_shows(tmp_path: Path) -> None:
    shown: dict[str, Shown] = {}
    with kernel(tmp_path) as running:
        for text, is_code in cells():
            if is_code and not text.startswith("%pip"):
                shown[text] = running.run(text, seconds=240)
                assert not shown[text].err, f"{text}\n{shown[text].err}"

    def of(part: str) -> Shown:
        return next(one for text, one in shown.items() if part in text)

    for part, drawn in {
        "display(index)": "<table",
        "wt.info(shards)": "<table",
        "wt.peek(train))": "<img",
        'order="classes"': "<img",
        "wt.peek(loader)": "<img",
        "wt.peek(batch": "<img",
        "display(loader)": "<table",
        "loader.report()": '<table class="bars"',
        "keys=wrong": "<img",
        "wt.plan_epoch(": "<svg",
        "wt.bench(": '<table class="bars"',
    }.items():
        (bundle,) = of(part).displays
        assert drawn in bundle["text/html"], part
        assert bundle["text/plain"].strip(), part
    for part in ('plot("Loss"', 'plot("Accuracy"'):
        assert all(
            "<svg" in one.get("text/html", "") or "image/png" in one for one in of(part).displays
        )
    for one in shown.values():
        for bundle in one.displays:
            check_part(bundle.get("text/html", ""))
    assert of("other.close()").out.endswith("the same samples: True\nthe same pixels: True\n")
    assert of("processes.close()").out == "the same samples: True\nthe same pixels: True\n"
    assert float(re.findall(r"'accuracy': ([\d.]+)", of("wt.evaluate").out)[0]) > 0.8
    check_progress(of("wt.train("), steps=3 * 44)


def check_part(html: str) -> None:
    """A part of a notebook is our own, needs no network, runs nothing, and its looks are for itself."""
    assert "<script" not in html
    assert "http" not in html
    assert "<iframe" not in html
    for style in re.findall(r"<style>(.*?)</style>", html, re.DOTALL):
        for selectors in re.findall(r"([^{}]+)\{[^{}]*\}", style):
            assert all(one.strip().startswith(".wdstrain") for one in selectors.split(",")), (
                selectors
            )


def check_progress(shown: Shown, steps: int) -> None:
    """One output of plain text that is replaced, far fewer times than there are steps, and is empty in the end."""
    (first,) = shown.displays
    said = [first, *shown.updates]
    assert all(set(bundle) == {"text/plain"} for bundle in said)
    assert all(
        "\x1b" not in bundle["text/plain"] and "\n" not in bundle["text/plain"] for bundle in said
    )
    assert len(said) < steps
    assert said[-1] == {"text/plain": ""}
    assert "\x1b" not in shown.out
    assert not shown.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_notebook_runs_as_a_script(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-W", "error::UserWarning", str(SOURCE)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Index(1797 samples" in done.stdout
    assert "the same pixels: True" in done.stdout
    assert "Warning" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


# --- cells that are interrupted, fail, and run again -----------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cell_is_interrupted_and_run_again(opened: Kernel, workers: int) -> None:
    """In the loop, and where it waits for the first batch; what is left is the loader's own, and ends with it."""
    opened.run(f"loader = make(num_workers={workers})")
    for code in (
        # One print: an interrupt within a print can leave the lock of the kernel's stream locked.
        "begun = False\nwhile True:\n    for batch in loader:\n        if not begun:\n"
        "            begun = True\n            print('begun', flush=True)\n        time.sleep(0.005)",
        "print('begun', flush=True)\nwhile True: list(loader)",
    ):
        for _ in range(2):
            opened.interrupted(code)
            assert (
                opened.run("print(sum(len(batch['n']) for batch in loader.epoch(0)))").out
                == "210\n"
            )
    ours = json.loads(opened.run("import json\nprint(json.dumps(alive()))").out)
    assert len([one for one in ours if isinstance(one, int)]) == workers
    # none where the last interrupt came before the loop began: then the same epoch was asked for twice, and nothing is read ahead
    assert ours.count("wdstrain-reader") <= 1
    # The notebook keeps the last traceback. If the interrupt came in `iter(loader)` or `len(loader)`,
    # a frame in it refers to the loader itself.
    opened.run("1 / 0", fails=True)
    opened.run("del loader, batch")
    assert opened.run("print(alive())").out == "[]\n"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cell_that_failed_goes_on_with_the_next_epoch(opened: Kernel, workers: int) -> None:
    opened.run(f"loader = make(num_workers={workers})")
    again = "for batch in loader:\n    pass\nprint(loader.report()['epoch'], alive())"
    first, second = opened.run(again).out.split(" ", 1), opened.run(again).out.split(" ", 1)
    assert (first[0], second[0]) == ("0", "1")
    assert first[1] == second[1]  # a whole epoch says nothing, and starts nothing anew
    failed = opened.run("for batch in loader:\n    raise ValueError('mine')", fails=True)
    assert failed.error == "ValueError: mine"
    assert opened.run(again).out.split(" ", 1) == ["3", second[1]]
    opened.run("loader = make()")
    assert (
        opened.run("print(alive())").out == "[]\n"
    )  # the earlier one has ended, this one has not begun
    opened.run("del loader")


def test_a_loader_whose_bad_sample_was_an_error_ends_when_it_is_let_go(opened: Kernel) -> None:
    """The notebook keeps the traceback of an error, which goes through the pass over the loader."""
    opened.run(
        "bad = True\ndef made(sample):\n    if bad: raise ValueError('no')\n    return {'n': 1}"
    )
    opened.run("loader = make(transform=made)")
    assert opened.run("for batch in loader: pass", fails=True).error.startswith(
        "SampleError: s/part-00"
    )
    opened.run("bad = False\nfor batch in loader: pass")
    opened.run("del loader")
    assert opened.run("print(alive())").out == "[]\n"


def test_a_pass_that_ended_with_an_error_says_so(shards: Path) -> None:
    loader = wt.Loader(shards, {"n": wt.number("txt")}, batch_size=2)
    batches = iter(loader)
    with pytest.raises(wt.SampleError, match="sample"):
        next(batches)
    with pytest.raises(wt.WdstrainError, match="ended with an error"):
        next(batches)


# --- progress --------------------------------------------------------------------------------------------------------

TELLING = """
from wdstrain.report.terminal import ProgressReporter
with ProgressReporter() as teller:
    begun, count = time.monotonic(), 0
    while time.monotonic() - begun < 1.3:
        count += 1
        teller.step("epoch 1", count, 1_000_000_000, "loss 0.5")
    teller.line("epoch 1: done")
"""


def test_progress_is_one_line_of_text_that_is_replaced(opened: Kernel) -> None:
    shown = opened.run(TELLING)
    check_progress(shown, steps=6)
    assert shown.displays[0]["text/plain"].startswith("epoch 1: ")
    assert "loss 0.5" in shown.displays[0]["text/plain"]
    assert shown.out == "epoch 1: done\n"


@pytest.mark.slow
def test_what_a_notebook_starts_and_reads_has_no_cursor_movements_in_it(opened: Kernel) -> None:
    """A kernel sets FORCE_COLOR for whatever it starts."""
    code = f"import time\n{TELLING}"
    shown = opened.run(
        f"print(os.environ['FORCE_COLOR'])\n"
        f"done = subprocess.run([sys.executable, '-c', {code!r}], capture_output=True, text=True)\n"
        f"print(repr(done.stderr))"
    )
    assert shown.out == "1\n'epoch 1: done\\n'\n"


def test_tables_of_commands_are_text_in_a_notebook(opened: Kernel) -> None:
    shown = opened.run("from wdstrain.cli import main\n_ = main(['info', 's'])")
    assert not shown.displays
    assert "samples" in shown.out


# --- functions and classes of a notebook -----------------------------------------------------------------------------

CLASSES = """
class Half:
    names, example = ("cls",), None
    def read(self, name, data, out, draws):
        return int(bytes(data)) / 2

class Holder:
    names, example = ("cls",), None
    def __init__(self): self.parts = [{"inner": Half()}]
    def read(self, name, data, out, draws):
        return self.parts[0]["inner"].read(name, data, out, draws)

def whole(sample): return {"half": int(sample["cls"])}

def tried(method, workers, **given):
    begun = set(multiprocessing.active_children())
    try:
        loader = wt.Loader("s", batch_size=2, num_workers=workers, multiprocessing_context=method, **given)
    except wt.UsageError as error:
        return f"{error} {set(multiprocessing.active_children()) == begun}"
    total = sum(float(value) for batch in loader for value in batch["half"])
    loader.close()
    return total > 0
"""

PARTS = {
    "transform=lambda sample: {'half': int(sample['cls'])}": ("transform", "a lambda"),
    "transform=whole": ("transform", "the function 'whole'"),
    "fields={'label': wt.label(), 'half': Half()}": ("fields['half']", "the class 'Half'"),
    "fields={'label': wt.label(), 'half': Holder()}": ("fields['half']", "the class 'Holder'"),
}


@pytest.mark.parametrize("part", PARTS)
def test_notebook_objects_work_in_workers_or_are_refused_at_once(opened: Kernel, part: str) -> None:
    """In threads and where workers are forked they work; elsewhere construction says which, why, and what to do."""
    opened.run(CLASSES)
    assert (
        opened.run(f"print(tried(None, 0, {part}), tried('fork', 2, {part}))").out == "True True\n"
    )
    for method in ("spawn", "forkserver"):
        shown = opened.run(f"print(tried({method!r}, 2, {part}))")
        name, what = PARTS[part]
        assert shown.out.startswith(
            f"{name} cannot be sent to worker processes, which {method} starts: {what} is "
        )
        assert shown.out.endswith(
            "Use num_workers=0, a function or class at the top of a .py file that you import, or multiprocessing_context='fork'. True\n"
        )
        assert not shown.err


def test_bench_measures_threads_where_a_transform_cannot_be_sent(opened: Kernel) -> None:
    call = "wt.bench('s', transform=lambda sample: {'n': 1}, batch_size=2, seconds=0.1, "
    call += "multiprocessing_context='spawn', "
    assert not opened.run(f"{call} tune=True)").error
    shown = opened.run(f"{call} num_workers=1)", fails=True)
    assert shown.error.startswith("UsageError: transform cannot be sent to worker processes")


PROGRAM = """
import sys
import wdstrain as wt

class Half:
    names, example = ("cls",), None
    def read(self, name, data, out, draws):
        return int(bytes(data)) / 2

if __name__ == "__main__":
    try:
        loader = wt.Loader(sys.argv[1], {"half": Half()}, batch_size=7, num_workers=1, multiprocessing_context=sys.argv[2])
    except wt.UsageError as error:
        print(error)
    else:
        print(sum(value for batch in loader for value in batch["half"]))
        loader.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_program_with_a_file_sends_its_own_classes(
    tmp_path: Path, shards: Path, method: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    assert ran(tmp_path, ["program.py"], shards, method) == f"{sum(range(21)) / 2}\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-c", "stdin", "package", "module"])
def test_a_program_without_a_file_gets_an_error_about_its_classes(
    tmp_path: Path, shards: Path, how: str
) -> None:
    """python -c, python < program, and the __main__ of a package, which workers do not run again; but they do a module's."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "module.py").write_text(PROGRAM)
    words = {
        "-c": ["-c", PROGRAM],
        "stdin": ["-"],
        "package": ["-m", "package"],
        "module": ["-m", "module"],
    }[how]
    said = ran(tmp_path, words, shards, "spawn")
    if how == "module":
        assert said == f"{sum(range(21)) / 2}\n"
    else:
        assert said.startswith(
            "fields['half'] cannot be sent to worker processes, which spawn starts: the class 'Half' is of "
        )


def ran(folder: Path, words: list[str], shards: Path, method: str) -> str:
    """What a program printed; it must not have printed anything on stderr but how it indexed the shards."""
    wt.index(shards)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, *words, str(shards), method]
    given = PROGRAM if words == ["-"] else None
    done = subprocess.run(
        line, input=given, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


class Counting:
    """A transform with a counter that its processes share, and a tensor."""

    def __init__(self) -> None:
        self.count: Any = multiprocessing.get_context("spawn").Value("i", 0)
        self.ones = torch.ones(3)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        with self.count.get_lock():
            self.count.value += 1
        return {"n": self.ones * int(sample["cls"])}


@pytest.mark.slow
def test_counters_and_tensors_are_sent_to_processes_that_are_spawned(shards: Path) -> None:
    counting = Counting()
    loader = wt.Loader(
        shards, transform=counting, batch_size=7, num_workers=1, multiprocessing_context="spawn"
    )
    assert sum(float(batch["n"].sum()) for batch in loader) == 3 * sum(range(21))
    loader.close()
    assert counting.count.value >= 21


def test_an_open_file_is_named_as_not_picklable(shards: Path) -> None:
    counting = Counting()
    with (
        open(os.devnull) as counting.ones,
        pytest.raises(wt.UsageError, match=r"transform cannot .* spawn starts: .*TextIOWrapper"),
    ):
        wt.Loader(shards, transform=counting, num_workers=1, multiprocessing_context="spawn")
