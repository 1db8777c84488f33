"""README and guides: every block runs, every link resolves, every name and option exists."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest

import wdstrain
from tests.conftest import ROOT, write_class_folder
from tests.support.warm import warm
from tests.test_architecture import modules
from wdstrain.cli import main

README = ROOT / "README.md"
COMMANDS = ROOT / "docs" / "quickstart.md"  # contains the table of all commands
GUIDES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [README, *GUIDES]

# texts that begin with a folder of images; the others continue with the shards that these make
FROM_NOTHING = ("README", "quickstart", "convert")
# slow blocks: processes of torchrun, and imports of other trainers
SLOW = ("many-gpus", "trainers")
SLOW_MARKS = [pytest.mark.slow, pytest.mark.timeout(400)]
# texts whose blocks change the package: `test_extending` runs them
CHANGING = ("extending",)


class Block(NamedTuple):
    """Code between two fences, and the line number of its first line."""

    language: str
    code: str
    line: int


def blocks(text: Path) -> list[Block]:
    matches = re.finditer(r"^```(\w*)\n(.*?)^```$", text.read_text(), re.DOTALL | re.MULTILINE)
    return [
        Block(match[1], match[2], text.read_text().count("\n", 0, match.start()) + 1)
        for match in matches
    ]


def versions(block: Block) -> list[Block]:
    """Return the programs before and after a diff, or the block itself."""
    if block.language != "diff":
        return [block]
    return [
        Block("python", re.sub(rf"^[{kept} ]|^[{left}].*\n", "", block.code, flags=re.MULTILINE), 0)
        for kept, left in (("-", "+"), ("+", "-"))
    ]


def prose(text: Path) -> str:
    return re.sub(r"^```.*?^```$", "", text.read_text(), flags=re.DOTALL | re.MULTILINE)


# --- blocks run ---


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with warm(tmp_path_factory.mktemp("bin")) as folder:
        yield folder


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the inputs of the texts: photos/, table, arrays, HDF5, the demo's output."""
    write_class_folder(tmp_path / "photos", {"cat": 40, "dog": 40}, "jpg")
    photos = sorted((tmp_path / "photos").rglob("*.jpg"))
    rows = [f"{path.relative_to(tmp_path)},{n / 80}" for n, path in enumerate(photos)]
    (tmp_path / "log.csv").write_text("\n".join(["file,angle", *rows]) + "\n")
    np.save(tmp_path / "images.npy", np.zeros((9, 8, 8), np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(9) % 3)
    np.save(tmp_path / "depth.npy", np.zeros((9, 2)))
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["events/x"], file["events/energy"] = np.zeros((90, 4), np.float32), np.arange(90) / 8
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # the demo makes such a set of other images
    wdstrain.convert_folder("photos", "shards/demo", split={"train": 0.8, "val": 0.2})
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(item, id=item.stem, marks=SLOW_MARKS if item.stem in SLOW else [])
        for item in TEXTS
        if item.stem not in CHANGING
    ],
)
def test_code_blocks_of_a_guide_run(
    text: Path, newcomer: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run blocks in order in one folder; shell errors and Python warnings fail the test."""
    path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for torchrun, which starts another Python
    if text.stem not in FROM_NOTHING:
        split = {"train": 0.8, "val": 0.2}
        wdstrain.convert_folder("photos", "shards/photos", split=split, stratify="label")
    for block in itertools.chain.from_iterable(map(versions, blocks(text))):
        if block.language == "text" or "scripts/" in block.code:  # these have their own tests
            continue
        if block.language == "python":
            # a file, not -c: worker processes of some start methods import it
            (newcomer / "block.py").write_text(block.code)
        # warnings are errors in a snippet, but those of other trainers are not ours
        program = "python" if text.stem == "trainers" else "snippet"
        command = block.code if block.language == "bash" else f"{program} block.py"
        shell = ["bash", "-euo", "pipefail", "-c", command]
        done = subprocess.run(shell, capture_output=True, text=True)
        place = f"{text.name}, line {block.line}\n{block.code}"
        assert done.returncode == 0, f"{place}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_two_commands_of_the_readme_run(tmp_path: Path) -> None:
    """Run both from another folder: the demo in its own folder, and the checks without the tests.

    The demo trains on photographs, and prints its results and the next command.
    """
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        pytest.skip("the tests run in another environment than scripts/test.sh makes")
    (block,) = [b.code for b in blocks(README) if b.language == "bash" and "scripts/" in b.code]
    commands = [line.split("#")[0].split() for line in block.splitlines() if line.strip()]
    assert commands == [["bash", "scripts/demo.sh"], ["bash", "scripts/test.sh"]]
    demo, checks = [str(ROOT / words[1]) for words in commands]
    output = []
    # The demo can run again in the same folder.
    for words in (
        [demo, "--dir", str(tmp_path)],
        [checks, "--version"],
        [demo, "--dir", str(tmp_path)],
    ):
        done = subprocess.run(["bash", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        output.append(done.stdout)
    last = json.loads((tmp_path / "photos-run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val"]["accuracy"] >= 0.97
    words = ["1200", "shards", "MB", "samples/s", "stall", "accuracy"]
    assert all(word in output[0] for word in [*words, "wdstrain convert folder IMAGES"])
    assert "samples    1200" in output[2]
    table = output[0].partition("\nNext,")[0].splitlines()[-8:]
    assert max(map(len, table)) <= 80


# --- texts are complete ---


def test_every_block_has_a_language_that_is_tested() -> None:
    for text in TEXTS:
        opened = re.findall(r"^```(\w*)$", text.read_text(), re.MULTILINE)
        assert set(opened[::2]) <= {"bash", "diff", "python", "text"}, text.name
        assert set(opened[1::2]) <= {""}, text.name
        assert len(opened) == 2 * len(blocks(text)), text.name


def anchors(text: Path) -> set[str]:
    """Return the anchors of headings, by the rule of GitHub."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_link_resolves() -> None:
    for text in TEXTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            place = (text.parent / path).resolve() if path else text
            is_inside = place.is_relative_to(ROOT.resolve()) and place.exists()
            assert is_inside, f"{text.name}: {target} leads nowhere in the project"
            assert not anchor or anchor in anchors(place), f"{text.name}: {target} names no heading"
        for path in re.findall(r"`((?:tests|scripts|wdstrain)/[\w/.-]+)`", prose(text)):
            assert (ROOT / path).exists(), f"{text.name} speaks of {path}"


def test_every_guide_is_linked_from_the_readme_and_none_is_long() -> None:
    assert len(README.read_text().splitlines()) <= 150
    for guide in GUIDES:
        assert f"(docs/{guide.name})" in README.read_text()
        assert len(guide.read_text().splitlines()) <= 250, guide.name


def test_the_architecture_guide_names_every_package_and_modules_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = {name.partition(".")[0] for name in modules()} - {"", "__main__"}
    assert packages <= set(re.findall(r"^\| `(\w+)/?` \|", text, re.MULTILINE))
    kept_in = re.findall(r"`wdstrain\.([\w.]+)`", text)
    assert len(kept_in) >= 20
    assert not set(kept_in) - set(modules())
    promises = re.findall(r"^\|[^|]+\| `(\w+)` \| `wdstrain\.(\w+)", text, re.MULTILINE)
    assert len(promises) >= 30
    assert all(guess == package for guess, package in promises)


# --- texts are correct ---


def test_the_quick_start_has_every_verb_and_the_texts_every_public_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    verbs = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(verbs) == sorted(re.findall(r"^\| `(\w+)` ", COMMANDS.read_text(), re.MULTILINE))
    output = "\n".join(text.read_text() for text in TEXTS)
    spoken = set(re.findall(r"\bwt\.(\w+)", output)) | set(re.findall(r"`(\w+Error)`", output))
    assert spoken == set(wdstrain.__all__)


def test_every_option_in_the_guides_exists(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("folder", "table", "hdf5", "arrays", "tars", "torchvision", "coco", "yolo")
    verbs = [[verb] for verb in re.findall(r"^\| `(\w+)` ", COMMANDS.read_text(), re.MULTILINE)]
    verbs += [["convert", kind] for kind in kinds]
    # options of torchrun, srun, the example for Ray, and one of containers
    known = {"--ntasks-per-node", "--gpus-per-node", "--storage", "--workers", "--gpu", "--to"}
    known |= {"--standalone", "--nproc-per-node", "--nnodes", "--max-restarts", "--shm-size"}
    known |= {"--rdzv-backend", "--rdzv-endpoint"}
    for verb in verbs:
        with pytest.raises(SystemExit):
            main([*verb, "--help"])
        known |= set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    for text in TEXTS:
        mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text.read_text()))
        assert mentioned <= known, f"{text.name} speaks of {mentioned - known}"


def test_messages_in_troubleshooting_exist_in_the_package() -> None:
    """Messages in the troubleshooting guide equal those of the code; dots stand for values."""
    constants = []
    for path in modules().values():
        tree = ast.parse(path.read_text())
        constants += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            sides = [
                argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                for argument in call.args
            ]  # problem, hint
            constants += [
                f"{problem[-1].value!s} {hint[0].value!s}"
                for problem, hint in itertools.pairwise(sides)
                if isinstance(problem[-1], ast.Constant) and isinstance(hint[0], ast.Constant)
            ]
    output = "\0".join(" ".join(constant.split()) for constant in constants)
    output = re.sub(r"\{(resume|overwrite)\}", r"\1=True", output)
    output = re.sub(r"\{(\w+)\}", r"\1=", output)  # an option
    guide = ROOT / "docs" / "troubleshooting.md"
    quoted = [block.code for block in blocks(guide) if block.language == "text"]
    quoted += re.findall(r"^\| `(.+?)` \|", guide.read_text(), re.MULTILINE)
    parts = {
        part.strip(" :'") for message in quoted for part in " ".join(message.split()).split("...")
    }
    assert not {part for part in parts if part not in output}
