"""Training and validation samples of a run, and the source of their labels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from PIL import Image

import wdstrain as wt
from tests.conftest import encoded
from tests.support.small_runs import Linear, Lines, last, rows_of, saved
from wdstrain.cli import main

QUICK: dict[str, Any] = {"epochs": 1, "batch_size": 8, "image_size": 8}
KINDS = ("cat", "dog", "elk")


def image(number: int) -> bytes:
    """A red, green or blue image."""
    return encoded(Image.new("RGB", (8, 8), ("red", "lime", "blue")[number % 3]), "PNG")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of three splits, whose classes have 45, 27 and 18 of 90 samples."""
    folder = tmp_path_factory.mktemp("data") / "shards"
    kinds = [KINDS[(i % 10 >= 5) + (i % 10 >= 8)] for i in range(90)]
    samples = (
        {"__key__": f"{i:03d}", "png": image(i), "cls": kind, "json": {"group": i % 2}}
        for i, kind in enumerate(kinds)
    )
    split = {"train": 0.6, "extra": 0.2, "val": 0.2}
    wt.pack(samples, folder, split=split, stratify="label", classes=KINDS)
    return folder


def sizes(run: wt.TrainResult) -> tuple[int, int]:
    """Return the samples of the first epoch of a run, and of its validation."""
    line = run.epochs[0]
    return line["samples"] + line["left_out"], int(run.val["samples"])


@pytest.mark.parametrize("where", ["key != ''", "group == 1"])
def test_each_fold_validates_on_its_part_and_trains_on_the_others(
    shards: Path, tmp_path: Path, where: str
) -> None:
    """Of all samples, or of the selected ones. Classes are divided evenly."""
    urls = f"{shards}/train-*.tar"
    index = wt.open(urls).where(where)
    label = index.labels[0].name
    whole = Counter(index.table.column(label).to_pylist())
    for part, (train, val) in enumerate(index.folds(4, stratify=label), 1):
        out, table = tmp_path / str(part), tmp_path / f"{part}.csv"
        done = wt.train(urls, out, fold=f"{part}/4", where=where, model=Linear, **QUICK)
        assert sizes(done) == (len(train), len(val))
        counts = Counter(val.table.column(label).to_pylist())
        assert all(abs(counts[kind] - whole[kind] / 4) < 1 for kind in KINDS)
        wt.predict(last(out), val, table, model=Linear)
        assert [row["key"] for row in rows_of(table)] == val.keys(range(len(val)))


def test_train_and_val_may_be_named_splits_but_not_several_unnamed_splits(
    shards: Path, tmp_path: Path
) -> None:
    counts = [len(wt.open(f"{shards}/{split}-*.tar")) for split in ("train", "extra", "val")]
    named: list[Any] = [
        [f"{shards}/train-*.tar", f"{shards}/extra-*.tar"],
        [f"{shards}/extra-000000.tar", f"{shards}/train-000000.tar"],
        f"{shards}/{{train,extra}}-*.tar",
    ]
    for number, urls in enumerate(named):
        val, out = [f"{shards}/val-*.tar"], tmp_path / str(number)
        done = wt.train(urls, out, val=val, model=Linear, **QUICK)
        assert sizes(done) == (counts[0] + counts[1], counts[2])
    train, val = f"{shards}/train-*.tar", f"{shards}/val-*.tar"
    for urls, options, words in (
        (f"{shards}/*.tar", {"val": val}, "holds several splits: extra, train, val"),
        (shards, {"fold": "1/3"}, "holds several splits"),
        (train, {"val": val, "fold": "1/3"}, "Give either fold or val"),
    ):
        with pytest.raises(wt.UsageError, match=words):
            wt.train(urls, tmp_path / "run", **options, **QUICK)
    assert not (tmp_path / "run").exists()
    with pytest.raises(wt.UsageError, match="several splits"):
        wt.evaluate(last(tmp_path / "0"), shards, model=Linear)


@pytest.mark.parametrize(
    ("label", "classes", "expected"),
    [
        ("cls", None, ("0", "1", "2")),
        ("cls", "cat,dog,elk", KINDS),
        ("json.kind", None, KINDS),
        ("json.kind", "elk,dog,cat", KINDS[::-1]),
        ("txt:class", None, KINDS),
    ],
)
def test_shards_made_by_webdataset_are_trained_on_without_conversion(
    tmp_path: Path, label: str, classes: str | None, expected: tuple[str, ...]
) -> None:
    for split, start in (("train", 0), ("val", 1000)):
        with wds.TarWriter(str(tmp_path / f"{split}-000000.tar")) as writer:
            for i in range(24):
                kind = KINDS[i % 3]
                fields = {"png": image(i), "cls": i % 3, "json": {"kind": kind, "size": i}}
                writer.write({"__key__": f"{start + i:04d}", **fields, "txt": kind})
    options = {**QUICK, "epochs": 3, "lr": 0.02, "schedule": "constant", "model": Linear}
    options |= {"val": f"{tmp_path}/val-*.tar", "label": label, "classes": classes}
    done = wt.train(f"{tmp_path}/train-*.tar", tmp_path / "run", **options)
    assert done.task.heads[0].classes == expected
    assert done.val["accuracy"] == 1.0


def test_classes_may_be_learned_as_numbers_if_they_are_numbers(tmp_path: Path) -> None:
    ages, kinds = [20, 30] * 8, ["cat", "dog"] * 8
    labels = [wt.Label("age", "class", "json", "age", ("20", "30"))]
    labels += [wt.Label("kind", "class", "json", "kind", ("cat", "dog"))]
    rows = [
        {"png": image(0), "json": {"age": a, "kind": k}} for a, k in zip(ages, kinds, strict=True)
    ]
    wt.pack(rows, tmp_path / "set", labels=labels)
    options = {**QUICK, "model": Linear}
    head = wt.train(tmp_path / "set", tmp_path / "run", label="age:number", **options).task.heads[0]
    assert (head.kind, head.mean, head.deviation) == ("number", 25, 5)
    with pytest.raises(wt.UsageError, match="cannot be learned as 'number': its values are names"):
        wt.train(tmp_path / "set", tmp_path / "other", label="kind:number", **options)


def test_a_run_prints_its_data_and_the_best_checkpoint(shards: Path, tmp_path: Path) -> None:
    lines = Lines()
    done = wt.train(shards, tmp_path / "run", model=Linear, device="cpu", progress=lines, **QUICK)
    assert lines.lines[:4] == [
        "model tests.support.small_runs:Linear: 579 parameters, on cpu",
        "task: label (one of 3 classes)",
        "training: 54 samples; label: cat 27, dog 16, elk 11",
        "validation: 18 samples; label: cat 9, dog 6, elk 3",
    ]
    accuracy = f"{done.val['accuracy']:.2%}"
    assert lines.lines[-2:] == [
        "training ended: the 1 epoch is done",
        f"best.pt is of epoch 1: accuracy {accuracy}, the highest of all epochs",
    ]


def test_the_image_size_may_be_height_and_width(shards: Path, tmp_path: Path) -> None:
    """The model takes images of 4 x 16 pixels."""
    model = "tests.support.small_runs:Linear"
    (tmp_path / "recipe.toml").write_text("image_size = [4, 16]\n")
    words = ["train", str(shards), "--model", model, "--epochs", "1", "--batch-size", "8"]
    assert main([*words, "--out", f"{tmp_path}/flag", "--image-size", "4x16"]) == 0
    assert main([*words, "--out", f"{tmp_path}/file", "--config", f"{tmp_path}/recipe.toml"]) == 0
    wt.train(shards, tmp_path / "keyword", model=model, **{**QUICK, "image_size": (4, 16)})
    for name in ("flag", "file", "keyword"):
        assert saved(tmp_path / name)["1.weight"].shape == (3, 192)
