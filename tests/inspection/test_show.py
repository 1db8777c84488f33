"""`show` and `peek`: samples of shards, loaders and batches as delivered, broken ones included."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import wdstrain as wt
from tests.conftest import picture, write_class_folder, write_tar
from tests.support.servers import serving
from wdstrain.cli import main

RED = (200, 65, 43)


def npy(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=True)
    return buffer.getvalue()


def opened(file: Any) -> np.ndarray:
    """Return the pixels of an image file. uint8[h, w, 3]"""
    with Image.open(file) as image:
        return np.array(image)


def of_color(pixels: np.ndarray, color: tuple[int, int, int]) -> int:
    return int((pixels == color).all(2).sum())


def pixels_of(number: int) -> np.ndarray:
    return opened(io.BytesIO(picture(number)))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of three classes, 30, 20 and 10, in four shards."""
    folder = tmp_path_factory.mktemp("looking")
    write_class_folder(folder / "photos", {"cat": 30, "dog": 20, "owl": 10})
    wt.convert_folder(
        str(folder / "photos"), str(folder / "shards"), max_shard_samples=16, num_workers=1
    )
    return folder / "shards"


def foreign(folder: Path, count: int = 40, size: tuple[int, int] = (24, 20)) -> Path:
    """Write two foreign shards without an index."""
    samples = [
        (f"s{i:04d}", {"png": picture(i, size=size), "cls": b"%d" % (i % 4)}) for i in range(count)
    ]
    write_tar(folder / "a.tar", samples[: count // 2])
    write_tar(folder / "b.tar", samples[count // 2 :])
    return folder


# --- samples of shards ---


def test_the_first_samples_are_decoded_and_have_class_names(packed: Path) -> None:
    shown, index = wt.peek(packed, 5), wt.Loader(packed, batch_size=1).index
    assert [sample.key for sample in shown] == index.keys(np.arange(5))
    for sample in shown:
        name, _, number = sample.key.partition("/")
        assert sample.labels == {"label": name}
        np.testing.assert_array_equal(sample.picture, pixels_of(int(number)))
        assert (sample.shard, sample.split, sample.error) == (
            str(packed / "train-000000.tar"),
            "train",
            "",
        )
    assert [sample.offset for sample in shown] == index.offsets.start[:5].tolist()
    assert shown.title == f"{packed}: 5 of 60 samples, the first"


def test_random_samples_depend_on_the_seed(packed: Path) -> None:
    keys = [
        [sample.key for sample in wt.peek(packed, 20, order="random", seed=seed)]
        for seed in (3, 3, 4)
    ]
    assert keys[0] == keys[1] != keys[2]
    assert len(set(keys[0])) == 20
    assert len({sample.shard for sample in wt.peek(packed, 20, order="random")}) > 1
    assert len(wt.peek(packed, 100, order="random")) == 60


def test_samples_are_selected_evenly_over_all_or_the_named_classes(packed: Path) -> None:
    evenly = [sample.labels["label"] for sample in wt.peek(packed, 25, order="classes")]
    assert [evenly.count(name) for name in ("cat", "dog", "owl")] == [9, 8, 8]
    assert len(wt.peek(packed, 60, order="classes")) == 60
    assert [sample.labels["label"] for sample in wt.peek(packed, 2, classes=["owl", "cat"])] == [
        "owl",
        "owl",
        "cat",
        "cat",
    ]
    few = wt.peek(packed, 12, classes=["owl"])
    assert (
        few.title
        == f"{packed}: 10 of 60 samples, 12 of each of owl; there are fewer of owl (10) (seed 0)"
    )


def test_a_class_without_samples_has_no_line(packed: Path) -> None:
    index = wt.Loader(packed, batch_size=1).index
    label = dataclasses.replace(index.labels[0], classes=(*index.labels[0].classes, "yak"))
    index = dataclasses.replace(index, labels=(label,))
    assert len(wt.peek(index, 8, order="classes")) == 8
    assert len(wt.peek(index, 8, classes=["yak", "owl"])) == 8
    assert len(wt.peek(index, 8, classes=["yak"])) == 0
    assert "fewer of yak (0)" in wt.peek(index, 8, classes=["yak", "owl"]).title


def test_samples_are_selected_by_key_in_the_requested_order(packed: Path) -> None:
    keys = ["owl/055", "cat/003", "dog/031"]
    assert [sample.key for sample in wt.peek(packed, 1, keys=keys)] == keys


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"keys": ["cat/03"]}, "no sample has the key 'cat/03'. Use a key such as "),
        (
            {"classes": ["dgo"]},
            "the label 'label' has no class 'dgo'. Did you mean 'dog'? Use one of: cat, dog, owl.",
        ),
        ({"label": "labl"}, "there is no label 'labl'. Did you mean 'label'?"),
        ({"order": "last"}, "order='last': must be one of first, random, classes"),
        ({"n": 0}, "n=0: must be an integer >= 1"),
        ({"n": 2000}, "n=2000: must be 1 to 1000"),
        ({"keys": "cat/03"}, "no sample has the key 'cat/03'"),
        ({"keys": ["cat/003"], "classes": ["cat"]}, "by key, by class or at random"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_keys(
    packed: Path, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(wt.UsageError, match=re.escape(sentence)):
        wt.peek(packed, **asked)


def test_an_undecodable_image_is_replaced_by_its_error(tmp_path: Path) -> None:
    good, objects = picture(1), npy(np.array([{"a": 1}], object))
    samples = [
        ("a", {"png": good}),
        ("b", {"png": good[:60]}),
        ("c", {"png": b"", "cls": b"2"}),
        ("d", {"npy": objects}),
    ]
    shown = wt.peek(
        write_tar(tmp_path / "x.tar", [*samples, ("e", {"json": b"{", "txt": b"\xff"})]), 9
    )
    assert [bool(sample.error) for sample in shown] == [False, True, True, True, True]
    assert len(shown.bad) == 4
    assert shown[1].error.startswith("png: ")
    assert "no image of a known format (0 bytes" in shown[2].error
    assert shown[2].labels == {"cls": "2"}
    assert "Object arrays cannot be loaded" in shown[3].error or "Python objects" in shown[3].error
    assert "json: " in shown[4].error
    assert "txt: 'utf-8' codec can't decode" in shown[4].error


def test_a_changed_byte_is_shown_as_a_checksum_error(packed: Path, tmp_path: Path) -> None:
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    offset = next(
        at for name, at, _ in wt.Loader(packed, batch_size=1).index.members(2) if name == "png"
    )
    with open(tmp_path / "train-000000.tar", "r+b") as file:
        file.seek(offset + 40)
        file.write(b"\xaa")
    errors = [sample.error for sample in wt.peek(tmp_path, 4)]
    assert [bool(error) for error in errors] == [False, False, True, False]
    assert "the field png of sample" in errors[2]
    assert "has another crc32 than the index says" in errors[2]


def test_texts_json_numbers_and_arrays_are_shown_by_type(tmp_path: Path) -> None:
    rows, columns = np.mgrid[:20, :30]
    plane, colors = (
        (rows * columns).astype(np.float32),
        np.stack([rows, columns, rows]).astype(np.uint8),
    )
    sample = {
        "txt": b"a cat\n on a mat",
        "json": b'{"angle": 0.25, "kind": {"of": [1, 2]}}',
        "depth.npy": npy(plane),
        "planes.npy": npy(colors),
        "grey.npy": npy(colors[0][:, :, None]),
        "vector.npy": npy(np.arange(100.0)),
        "cls": b"7",
        "bin": bytes(50),
        "mp4": bytes(5000),
    }
    (seen,) = wt.peek(write_tar(tmp_path / "x.tar", [("a", sample)]))
    assert seen.text == "a cat on a mat"
    assert seen.labels == {"cls": "7"}
    assert seen.fields["json"] == "{angle: 0.25, kind: {of: [1, 2]}}"
    assert (seen.fields["bin"], seen.fields["mp4"]) == ("50 B", "5 KB")
    assert seen.fields["vector.npy"] == "float64[100]"
    assert seen.fields["depth.npy"] == "float32[20, 30]"
    assert list(seen.pictures) == ["depth.npy", "planes.npy", "grey.npy"]
    np.testing.assert_array_equal(seen.pictures["depth.npy"][:, :, 1], np.rint(plane * (255 / 551)))
    np.testing.assert_array_equal(seen.pictures["planes.npy"], np.moveaxis(colors, 0, -1))
    np.testing.assert_array_equal(seen.pictures["grey.npy"][:, :, 2], colors[0])


def test_labels_of_a_table_are_shown_by_name(tmp_path: Path) -> None:
    write_class_folder(tmp_path, {"cat": 3})
    (tmp_path / "t.csv").write_text(
        "f,angle,kind,speed\n" + "".join(f"cat/00{i}.png,{i / 4},k{i % 2},{i}\n" for i in range(3))
    )
    wt.convert_table(
        str(tmp_path / "t.csv"),
        str(tmp_path / "out"),
        image="f",
        label=["angle:number", "kind"],
        shuffle=False,
        num_workers=1,
    )
    shown = wt.peek(tmp_path / "out")
    assert [sample.labels for sample in shown] == [
        {"angle": "0", "kind": "k0"},
        {"angle": "0.25", "kind": "k1"},
        {"angle": "0.5", "kind": "k0"},
    ]
    assert [sample.labels for sample in wt.peek(tmp_path / "out", label="kind")] == [
        {"kind": "k0"},
        {"kind": "k1"},
        {"kind": "k0"},
    ]
    assert shown[1].fields["json"].endswith("speed: 1}")


def test_classes_come_from_the_index_without_reading_labels(packed: Path) -> None:
    with serving(packed) as served:
        wt.peek(f"{served.url}/index.json", 2, classes=["owl"])
        requested = [path for path, _ in served.requests]
    assert len([path for path in requested if path.endswith(".tar")]) == 2


# --- bytes read ---


def test_only_shown_samples_of_unindexed_shards_on_a_server_are_read(tmp_path: Path) -> None:
    foreign(tmp_path)
    with serving(tmp_path) as served:
        shown = wt.peek([f"{served.url}/a.tar?sig=hush", f"{served.url}/b.tar?sig=hush"], 5)
        requested = [(path.split("?")[0], ranged) for path, ranged in served.requests]
    assert [sample.key for sample in shown] == [f"s{i:04d}" for i in range(5)]
    np.testing.assert_array_equal(shown[4].picture, pixels_of(4))
    assert len([path for path, _ in requested if path == "/a.tar"]) == 6  # headers, and each sample
    assert not [path for path, _ in requested if path == "/b.tar"]
    assert "hush" not in shown.title + shown[0].shard + repr(shown)
    assert "unknown without an index" in shown.title


def test_a_scan_continues_into_the_next_shard_if_needed(tmp_path: Path) -> None:
    shown = wt.peek(foreign(tmp_path), 25)
    assert [sample.key for sample in shown] == [f"s{i:04d}" for i in range(25)]
    assert not (tmp_path / ".wdstrain").exists()


def test_indexed_samples_take_one_request_each(packed: Path) -> None:
    with serving(packed) as served:
        shown = wt.peek(f"{served.url}/index.json", 7, order="random")
        requested = [path for path, _ in served.requests]
    assert len([path for path in requested if path.endswith(".tar")]) == 7
    assert [sample.key for sample in shown] == [
        sample.key for sample in wt.peek(packed, 7, order="random")
    ]


def test_fields_that_cannot_be_shown_are_not_read(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "a.tar", [("a", {"cls": b"1", "mp4": bytes(3_000_000), "png": picture(1)})]
    )
    wt.index(tmp_path)
    with serving(tmp_path) as served:
        (seen,) = wt.peek(f"{served.url}/a.tar")
        ranges = [
            ranged.removeprefix("bytes=").split("-") for _, ranged in served.requests if ranged
        ]
    assert sum(int(stop) - int(start) + 1 for start, stop in ranges) < 10_000
    assert (seen.labels, seen.fields["mp4"]) == ({"cls": "1"}, "3 MB")
    np.testing.assert_array_equal(seen.picture, pixels_of(1))


def test_selecting_from_unindexed_shards_reports_the_bytes_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = wt.peek(foreign(tmp_path), 8, order="classes")
    assert "scanned the headers of 40 samples" in caplog.text
    assert [sample.labels["cls"] for sample in shown] == ["0", "0", "1", "1", "2", "2", "3", "3"]


# --- samples of a loader ---


def fields(**options: Any) -> dict[str, wt.Field]:
    return {"image": wt.image(size=24, augment="rrc+flip", **options), "label": wt.label()}


@pytest.mark.parametrize("workers", [0, 2])
def test_peeking_into_a_loader_shows_the_next_epoch_and_affects_no_loop(
    packed: Path, workers: int
) -> None:
    options: Any = {"batch_size": 8, "seed": 5}
    with_others = [list(wt.Loader(packed, fields(), **options).epoch(epoch)) for epoch in (0, 1)]
    loader = wt.Loader(packed, fields(), num_workers=workers, **options)
    delivered = []
    for step, batch in enumerate(loader):
        delivered.append(batch)
        if step == 2:
            before, threads = loader.state_dict(), threading.active_count()
            shown = wt.peek(loader, 12)
            assert (loader.state_dict(), threading.active_count()) == (before, threads)
    rows = [(batch, row) for batch in with_others[1] for row in range(8)][:12]
    assert [sample.key for sample in shown] == [batch["__key__"][row] for batch, row in rows]
    for sample, (batch, row) in zip(shown, rows, strict=True):
        np.testing.assert_array_equal(sample.picture, batch["image"][row].permute(1, 2, 0))
        assert sample.labels == {"label": sample.key.split("/")[0]}
        assert Path(sample.shard).parent == packed
    assert all(
        torch.equal(item["image"], other["image"])
        for item, other in zip(delivered, with_others[0], strict=True)
    )
    assert shown.title == f"{packed}: the first 12 samples of epoch 1 of a Loader"
    loader.close()


def test_peeking_starts_at_a_loaded_state(packed: Path) -> None:
    loader = wt.Loader(packed, fields(), batch_size=8)
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "step": 3})
    shown = wt.peek(loader, 3)
    assert "epoch 2 from step 3 on" in shown.title
    batch = next(iter(loader))
    assert [sample.key for sample in shown] == batch["__key__"][:3]
    loader.close()


def test_bad_samples_of_a_loader_are_noted(tmp_path: Path) -> None:
    samples = [(f"s{i}", {"png": picture(i) if i != 2 else b"no picture"}) for i in range(6)]
    shard = write_tar(tmp_path / "x.tar", samples)
    options: Any = {"batch_size": 6, "shuffle": False}
    shown = wt.peek(
        wt.Loader(
            shard, {"image": wt.image(size=8)}, on_error="replace", max_errors=1.0, **options
        ),
        6,
    )
    assert shown[2].key == "s1"
    assert any("'s2', field 'png'" in note for note in shown.notes)
    with pytest.raises(wt.SampleError, match="'s2'"):
        wt.peek(wt.Loader(shard, {"image": wt.image(size=8)}, **options))


def test_loaders_without_fields_with_transforms_and_mixtures_are_shown(
    packed: Path, tmp_path: Path
) -> None:
    plain = wt.peek(wt.Loader(packed, batch_size=4), 3)
    assert all(
        item.picture is not None and item.labels == {"label": item.key.split("/")[0]}
        for item in plain
    )
    shown = wt.peek(
        wt.Loader(
            packed,
            transform=lambda sample: {"size": len(sample["png"]), "x": torch.ones(3)},
            batch_size=4,
        ),
        2,
    )
    assert shown[0].fields == {"x": "float32[3]"}
    assert shown[0].labels["size"].isdecimal()
    mixed = wt.peek(
        wt.mix({"a": packed, "b": foreign(tmp_path)}, {"image": wt.image(size=20)}, batch_size=10),
        20,
    )
    assert {item.labels["source"] for item in mixed} == {"a", "b"}


def size_and_draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"size": len(sample["png"]), "draw": float(rng.random())}


def test_peek_runs_the_transform_of_a_loader_without_workers(packed: Path) -> None:
    loader = wt.Loader(packed, transform=size_and_draw, batch_size=4, num_workers=1, seed=2)
    iterator = iter(loader.epoch(0))
    next(iterator)
    children = multiprocessing.active_children()
    shown = wt.peek(loader, 4)
    assert multiprocessing.active_children() == children
    batch = next(iter(loader))
    assert [sample.labels["draw"] for sample in shown] == [
        f"{value:.5g}" for value in batch["draw"].tolist()
    ]
    assert [sample.key for sample in shown] == batch["__key__"]
    loader.close()


def test_a_normalized_batch_is_scaled_and_mixed_labels_are_shares(packed: Path) -> None:
    plain = wt.Loader(packed, {"image": wt.image(size=20), "label": wt.label()}, batch_size=16)
    normal = wt.Augmentation(normalize="imagenet", dtype=torch.bfloat16)
    batch = next(iter(wt.to_device(plain.epoch(0), "cpu", normal)))
    shown = wt.peek(batch, 16)
    for sample, pixels in zip(shown, batch["image"].float(), strict=True):
        low, high = float(pixels.min()), float(pixels.max())
        expected = (pixels.permute(1, 2, 0).numpy() - low) * (255 / (high - low))
        assert sample.picture is not None
        assert np.abs(sample.picture - expected).max() <= 1
    mixing = wt.Augmentation(mixup=1.0, classes=3)
    names = plain.index.labels[0].classes
    batch = next(iter(wt.to_device(plain.epoch(0), "cpu", mixing)))
    row = int(batch["label"].max(1).values.argmin())
    seen = wt.peek(batch, 16, classes=names)[row]
    largest = batch["label"][row].argmax()
    assert seen.labels["label"].startswith(
        f"{names[int(largest)]} {float(batch['label'][row][largest]):.0%}, "
    )
    plain.close()


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 200.0), (-1.0, 1.0), (-9.0, 7.0)])
def test_float_images_are_scaled_by_their_range(low: float, high: float) -> None:
    shares = torch.linspace(0, 1, 3 * 10 * 12).view(1, 3, 10, 12).expand(2, 3, 10, 12)
    shown = wt.peek({"image": low + shares * (high - low)}, 2)
    expected = (shares * 255).round().permute(0, 2, 3, 1).numpy()
    for sample, expected_values in zip(shown, expected, strict=True):
        assert sample.picture is not None
        assert np.abs(sample.picture - expected_values).max() <= 1
    assert [sample.key for sample in shown] == ["row 0", "row 1"]


def test_planes_of_whole_numbers_are_an_image_and_no_mask() -> None:
    planes = torch.arange(3 * 10 * 12).view(1, 3, 10, 12)
    (view,) = wt.peek({"x": planes})
    assert (view.fields, view.labels) == ({"x": "int64[3, 10, 12]"}, {})
    assert view.picture is not None
    assert view.picture[-1, -1].tolist() == [85, 170, 255]


def test_a_source_with_its_own_order_refuses_a_selection(packed: Path) -> None:
    loader = wt.Loader(packed, fields(), batch_size=4)
    with pytest.raises(wt.UsageError, match="a Loader has an order of its own"):
        wt.peek(loader, order="random")
    with pytest.raises(wt.UsageError, match="Give one of its batches"):
        wt.peek(iter(loader))
    with pytest.raises(wt.UsageError, match="no column with a row for each sample"):
        wt.peek({"a": 3})


# --- sheets and pages ---

ODD = [
    "<script>alert(1)<",
    "猫/ねこ",
    "ä" * 300,
    "rtl\u202eexe",
    "bad\udce9name",
    "tab\there\nnew",
    "plain",
]


def odd(folder: Path) -> wt.Peek:
    samples = [
        (key, {"png": picture(i), "txt": f"<b>{key}</b>".encode("utf-8", "replace") * 9})
        for i, key in enumerate(ODD)
    ]
    return wt.peek(write_tar(folder / "odd.tar", samples), 20)


def test_a_sheet_accepts_any_key_and_frames_broken_samples(tmp_path: Path) -> None:
    actual = odd(tmp_path)
    assert [sample.key for sample in actual] == ODD
    sheet = opened(actual.save(tmp_path / "whole.png"))
    shard = write_tar(tmp_path / "b.tar", [("a", {"png": picture(1)}), ("b", {"png": b"no"})])
    broken = opened(wt.peek(shard).save(tmp_path / "broken.PNG"))
    assert of_color(sheet, RED) == 0 < of_color(broken, RED)


def test_samples_without_images_are_shown_as_text(tmp_path: Path) -> None:
    rows = [(f"doc/{i}", {"txt": b"a few words", "json": b'{"age": 3}'}) for i in range(4)]
    shown = wt.peek(write_tar(tmp_path / "x.tar", rows))
    assert all(text in repr(shown) for text in ("a few words", "age: 3", "doc/3"))
    assert opened(shown.save(tmp_path / "s.png")).std() > 0


def test_tiny_images_are_enlarged_without_interpolation(tmp_path: Path) -> None:
    checks = ((np.indices((8, 8)).sum(0) % 2) * 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(checks).save(buffer, "PNG")
    shown = wt.peek(write_tar(tmp_path / "x.tar", [("a", {"png": buffer.getvalue()})]))
    assert of_color(opened(shown.save(tmp_path / "s.png")), (0, 0, 0)) == 192 * 192 / 2


def test_a_sheet_of_many_samples_has_a_bounded_size(tmp_path: Path) -> None:
    samples = [(f"k{i:05d}", {"png": picture(i), "cls": b"%d" % i}) for i in range(600)]
    shown = wt.peek(write_tar(tmp_path / "x.tar", samples), 600, order="classes")
    assert len({sample.labels["cls"] for sample in shown}) == 600
    height, width, _ = opened(shown.save(tmp_path / "s.png")).shape
    assert width <= 4000
    assert width * height < 50e6


def test_other_extensions_are_refused_and_a_failed_write_leaves_no_file(
    packed: Path, tmp_path: Path
) -> None:
    shown = wt.peek(packed, 2)
    with pytest.raises(wt.UsageError, match=r"must end in .png"):
        shown.save(tmp_path / "sheet.jpg")
    with pytest.raises(wt.StorageError, match="cannot be written"):
        shown.save(tmp_path / "absent" / "sheet.png")
    assert list(tmp_path.iterdir()) == []


def test_a_peek_prints_as_a_table_with_complete_keys(packed: Path) -> None:
    shown = wt.peek(packed, 30)
    lines = repr(shown).splitlines()
    assert lines[0] == shown.title
    assert shown[0].key in lines[1]
    assert lines[-1] == "... and 10 more"
    assert max(map(len, repr(shown).splitlines()[1:])) <= 80
    assert all(sample.key in repr(shown) for sample in shown[:20])
    assert all(ord(letter) > 31 for letter in repr(odd(packed.parent)).replace("\n", ""))


def test_a_loader_prints_what_it_reads_and_where_it_is(packed: Path) -> None:
    loader = wt.Loader(packed, fields(), batch_size=8, seed=3)
    for words in (
        "60 samples in 4 shards",
        "7 batches of 8",
        "4 samples left out",
        "image: uint8[8, 3, 24, 24]",
        "int64[8]",
        "rank 0 of 1",
        "seed 3",
    ):
        assert words in repr(loader)
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert "at epoch 0, step 2 of 7" in repr(loader)
    loader.close()


# --- the verb ---


def test_show_writes_a_sheet_or_prints_a_table(packed: Path, tmp_path: Path, capsys: Any) -> None:
    sheet = tmp_path / "s.png"
    assert main(["show", str(packed), "-o", str(sheet), "-n", "6", "--random"]) == 0
    assert sheet.stat().st_size > 1000
    assert "6 of 60 samples" in " ".join(capsys.readouterr().out.split())
    assert main(["show", str(packed), "-n", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert max(map(len, printed[1:])) <= 80


def test_show_lists_the_shown_samples(packed: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["show", str(packed), "--json", "--class", "owl,cat", "-n", "2"]
    assert main([*words, "-o", str(tmp_path / "s.png")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["shown"], document["broken"], document["file"]) == (
        4,
        0,
        str(tmp_path / "s.png"),
    )
    assert [sample["labels"]["label"] for sample in document["samples"]] == [
        "owl",
        "owl",
        "cat",
        "cat",
    ]
    assert document["samples"][0]["pictures"] == ["png"]
    assert document["samples"][0]["shard"].startswith(str(packed))


def test_show_counts_broken_samples_and_exits_with_0(tmp_path: Path, capsys: Any) -> None:
    shard = write_tar(
        tmp_path / "x.tar", [("a", {"png": b"no", "cls": b"1"}), ("bad\udce9", {"png": picture(1)})]
    )
    assert main(["show", str(shard), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["broken"] == 1
    assert "'a' at offset 0: png: no image of a known format" in printed.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-o", "sheet.jpg"], "sheet.jpg: the file must end in .png"),
        (["--key", "cat/999"], "no sample has the key 'cat/999'"),
        (["--class", "yak"], "has no class 'yak'"),
        (["-n", "5000"], "--limit 5000: must be 1 to 1000"),
    ],
)
def test_show_refuses_contradicting_options(
    packed: Path, capsys: Any, words: list[str], sentence: str
) -> None:
    assert main(["show", str(packed), *words]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.out == ""
