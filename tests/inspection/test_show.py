"""`show` and `peek`: samples of shards, broken ones included, and their contact sheets."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import wdstrain as wt
from tests.conftest import (
    encoded,
    npy,
    picture,
    write_class_folder,
    write_picture_shards,
    write_tar,
)
from tests.support.scenes import NAMES, scene
from tests.support.servers import serving
from tests.support.tables import Tables
from wdstrain.cli import main

RED = (200, 65, 43)


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
    wt.convert_folder(folder / "photos", folder / "shards", max_shard_samples=16)
    return folder / "shards"


def labels(shown: wt.Peek, name: str = "label") -> list[str]:
    return [sample.labels[name] for sample in shown]


# --- samples of shards ---


def test_the_first_samples_are_decoded_and_have_class_names(packed: Path) -> None:
    shown, index = wt.peek(packed, 5), wt.open(packed)
    assert [sample.key for sample in shown] == index.keys(np.arange(5))
    assert [sample.offset for sample in shown] == index.offsets.start[:5].tolist()
    for sample in shown:
        name, _, number = sample.key.partition("/")
        assert (sample.labels, sample.error) == ({"label": name}, "")
        assert sample.shard == str(packed / "train-000000.tar")
        np.testing.assert_array_equal(sample.picture, pixels_of(int(number)))
    assert shown.title == f"{packed}: 5 of 60 samples, the first"


def test_random_samples_depend_on_the_seed(packed: Path) -> None:
    keys = [[s.key for s in wt.peek(packed, 20, order="random", seed=seed)] for seed in (3, 3, 4)]
    assert keys[0] == keys[1] != keys[2]
    assert len(set(keys[0])) == 20
    assert len({sample.shard for sample in wt.peek(packed, 20, order="random")}) > 1
    assert len(wt.peek(packed, 100, order="random")) == 60


def test_samples_are_selected_evenly_over_all_or_the_named_classes(packed: Path) -> None:
    evenly = labels(wt.peek(packed, 25, order="classes"))
    assert evenly == sorted(evenly)
    assert sorted(Counter(evenly).values()) == [8, 8, 9]
    drawn = {tuple(labels(wt.peek(packed, 2, order="classes", seed=seed))) for seed in range(20)}
    assert len(drawn) == 3  # of more classes than samples, any are shown
    assert labels(wt.peek(packed, 2, classes=["owl", "cat"])) == ["owl", "owl", "cat", "cat"]
    few = wt.peek(packed, 12, classes=["owl"])
    assert few.title == f"{packed}: 10 of 60 samples, 12 of each of owl (seed 0)"
    chosen = wt.peek(packed, where="key in ['owl/055', 'cat/003']")
    assert [sample.key for sample in chosen] == ["cat/003", "owl/055"]


def test_samples_of_several_classes_are_shown_with_each_and_numbers_by_name(tmp_path: Path) -> None:
    tags = [["a"], ["a", "b"], ["b"], []]
    entries = [{"tags": own, "angle": n / 4, "speed": n} for n, own in enumerate(tags)]
    names = wt.Label("tags", "multi", "json", "tags", ("a", "b", "none"))
    labels = [names, wt.Label("angle", "number", "json", "angle")]
    rows = [{"__key__": f"k{n}", "json": entry} for n, entry in enumerate(entries)]
    wt.pack(rows, tmp_path / "set", labels=labels, shuffle=False)
    shown = wt.peek(tmp_path / "set", 3, label="tags", classes=["b", "a"])
    assert [sample.key for sample in shown] == ["k1", "k2", "k0", "k1"]
    assert len(wt.peek(tmp_path / "set", 3, classes=["none", "a"])) == 2
    numbers = wt.peek(tmp_path / "set", 3, label="angle")
    assert [sample.labels for sample in numbers] == [{"angle": x} for x in ("0", "0.25", "0.5")]
    assert numbers[1].fields["json"].endswith("speed: 1}")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"classes": ["dgo"]},
            "the label 'label' has no class 'dgo'. Did you mean 'dog'? Use one of: cat, dog, owl.",
        ),
        ({"label": "labl"}, "there is no label 'labl'. Did you mean 'label'?"),
        ({"order": "last"}, "order='last': must be one of first, random, classes"),
        ({"n": 2000}, "n=2000: must be 1 to 1000"),
        ({"n": 600, "classes": ["cat", "dog"]}, "n=600: must be 1 to 1000 samples in all"),
        ({"where": "key == 'cat/03'"}, "holds for none of 60 samples"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_ones(
    packed: Path, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(wt.UsageError, match=re.escape(sentence)):
        wt.peek(packed, **asked)


def test_a_sample_that_cannot_be_decoded_is_replaced_by_its_error(tmp_path: Path) -> None:
    good = picture(1)
    rows = [
        ("a", {"png": good}),
        ("b", {"png": good[:60]}),
        ("c", {"png": b"", "cls": b"2"}),
        ("d", {"npy": npy(np.array([{"a": 1}], object))}),
        ("e", {"json": b"{", "txt": b"\xff"}),
    ]
    shown = wt.peek(write_tar(tmp_path / "x.tar", rows), 9)
    assert [bool(sample.error) for sample in shown] == [False, True, True, True, True]
    assert len(shown.bad) == 4
    assert shown[2].labels == {"cls": "2"}
    for number, words in (
        (1, "^png: "),
        (2, r"no image of a known format \(0 bytes"),
        (3, "Object arrays cannot be loaded|Python objects"),
        (4, "json: .*txt: 'utf-8' codec can't decode"),
    ):
        assert re.search(words, shown[number].error), shown[number].error
    wt.pack([{"png": picture(n)} for n in range(3)], tmp_path / "set", shuffle=False)
    ((_, offset, _),) = wt.open(tmp_path / "set").members(2)
    with open(tmp_path / "set" / "train-000000.tar", "r+b") as file:
        file.seek(offset + 40)
        file.write(b"\xaa")
    errors = [sample.error for sample in wt.peek(tmp_path / "set")]
    assert [bool(error) for error in errors] == [False, False, True]
    assert re.search("the field png of sample .* has another crc32 than the index", errors[2])


def test_texts_json_numbers_and_arrays_are_shown_by_type(tmp_path: Path) -> None:
    rows, columns = np.mgrid[:20, :30]
    plane = (rows * columns).astype(np.float32)
    colors = np.stack([rows, columns, rows]).astype(np.uint8)
    sample = {
        "txt": b"a cat\n on a mat",
        "json": b'{"angle": 0.25, "kind": {"of": [1, 2]}}',
        "depth.npy": npy(plane),
        "planes.npy": npy(colors),
        "grey.npy": npy(colors[0][:, :, None]),
        "vector.npy": npy(np.arange(100.0)),
        "cls": b"7",
        "mp4": bytes(5000),
    }
    (seen,) = wt.peek(write_tar(tmp_path / "x.tar", [("a", sample)]))
    assert seen.labels == {"cls": "7"}
    assert seen.fields == {
        "txt": "a cat on a mat",
        "json": "{angle: 0.25, kind: {of: [1, 2]}}",
        "mp4": "5 KB",
        "vector.npy": "float64[100]",
        "depth.npy": "float32[20, 30]",
        "planes.npy": "uint8[3, 20, 30]",
        "grey.npy": "uint8[20, 30, 1]",
    }
    assert list(seen.pictures) == ["depth.npy", "planes.npy", "grey.npy"]
    np.testing.assert_array_equal(seen.pictures["depth.npy"][:, :, 1], np.rint(plane * (255 / 551)))
    np.testing.assert_array_equal(seen.pictures["planes.npy"], np.moveaxis(colors, 0, -1))
    np.testing.assert_array_equal(seen.pictures["grey.npy"][:, :, 2], colors[0])
    shares = np.linspace(0, 1, 360).reshape(3, 10, 12)
    arrays = [
        shares,
        shares * 200,
        shares * 2 - 1,
        shares * 16 - 9,
        np.arange(360).reshape(3, 10, 12),
    ]
    numbers = [(f"{n}", {"npy": npy(array)}) for n, array in enumerate(arrays)]
    for view in wt.peek(write_tar(tmp_path / "y.tar", numbers)):  # scaled by their range
        assert view.picture is not None
        assert np.abs(view.picture - np.moveaxis(shares, 0, -1) * 255).max() <= 1


def test_what_is_moved_by_looking_at_it_is_refused(packed: Path) -> None:
    with wt.Loader(packed, batch_size=4) as loader:
        for source in (loader, iter(loader), next(iter(loader))):
            with pytest.raises(
                wt.UsageError, match=r"samples of shards are shown, .* loader.index"
            ):
                wt.peek(source)


def test_a_loader_prints_what_it_reads_and_where_it_is(packed: Path) -> None:
    fields = {"image": wt.image(size=24), "label": wt.label()}
    with wt.Loader(packed, fields, batch_size=8, seed=3) as loader:
        for words in (
            *("60 samples in 4 shards", "7 batches of 8", "4 samples left out"),
            *("image: uint8[8, 3, 24, 24]", "int64[8]", "rank 0 of 1", "seed 3"),
        ):
            assert words in repr(loader)
        iterator = iter(loader)
        next(iterator), next(iterator)
        assert "at epoch 0, step 2 of 7" in repr(loader)


# --- bytes read ---


def test_unindexed_shards_are_read_as_far_as_needed_also_on_a_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_picture_shards(tmp_path, [20, 20])
    with serving(tmp_path) as served:
        shown = wt.peek([f"{served.url}/p-{n}.tar?sig=hush" for n in (0, 1)], 5)
        requested = [path.split("?")[0] for path, _ in served.requests]
    assert [sample.key for sample in shown] == [f"s{i:03d}" for i in range(5)]
    np.testing.assert_array_equal(shown[4].picture, pixels_of(4))
    assert requested.count("/p-0.tar") == 6  # headers, and each sample
    assert "/p-1.tar" not in requested
    assert "hush" not in shown.title + shown[0].shard + repr(shown)
    assert "5 samples of a number that is unknown without an index" in shown.title
    assert [sample.key for sample in wt.peek(tmp_path, 25)] == [f"s{i:03d}" for i in range(25)]
    assert not (tmp_path / ".wdstrain").exists()
    assert "scanned" not in caplog.text
    assert labels(wt.peek(tmp_path, 10, order="classes"), "cls") == [*"0123456789"]
    assert "scanned the headers of 40 samples" in caplog.text


@pytest.mark.parametrize(("options", "count"), [({"order": "random"}, 7), ({"classes": "owl"}, 2)])
def test_indexed_samples_take_one_request_each(
    packed: Path, options: dict[str, Any], count: int
) -> None:
    with serving(packed) as served:
        shown = wt.peek(f"{served.url}/index.json", count, **options)
        requested = [path for path, _ in served.requests if path.endswith(".tar")]
    assert len(requested) == count
    assert [one.key for one in shown] == [one.key for one in wt.peek(packed, count, **options)]


def test_fields_that_cannot_be_shown_are_not_read(tmp_path: Path) -> None:
    sample = {"cls": b"1", "mp4": bytes(3_000_000), "png": picture(1)}
    write_tar(tmp_path / "a.tar", [("a", sample)])
    wt.index(tmp_path)
    with serving(tmp_path) as served:
        (seen,) = wt.peek(f"{served.url}/a.tar")
        ranges = [r.removeprefix("bytes=").split("-") for _, r in served.requests if r]
    assert sum(int(stop) - int(start) + 1 for start, stop in ranges) < 10_000
    assert (seen.labels, seen.fields["mp4"]) == ({"cls": "1"}, "3 MB")
    np.testing.assert_array_equal(seen.picture, pixels_of(1))


# --- sheets ---


def test_a_sheet_accepts_any_key_and_frames_broken_samples(tmp_path: Path) -> None:
    keys = [
        *("<script>alert(1)<", "猫/ねこ", "ä" * 300, "rtl\u202eexe", "bad\udce9name"),
        *("tab\there\nnew", "plain"),
    ]
    rows = [(key, {"png": picture(i), "txt": b"<b>a few words</b>"}) for i, key in enumerate(keys)]
    shown = wt.peek(write_tar(tmp_path / "odd.tar", rows), 20)
    assert [sample.key for sample in shown] == keys
    assert all(ord(letter) > 31 for letter in repr(shown).replace("\n", ""))
    sheet = opened(shown.save(tmp_path / "whole.png"))
    shard = write_tar(tmp_path / "b.tar", [("a", {"png": picture(1)}), ("b", {"png": b"no"})])
    broken = opened(wt.peek(shard).save(tmp_path / "broken.PNG"))
    assert of_color(sheet, RED) == 0 < of_color(broken, RED)


def test_samples_without_images_are_shown_as_text(tmp_path: Path) -> None:
    rows = [(f"doc/{i}", {"txt": b"a few words", "json": b'{"age": 3}'}) for i in range(4)]
    shown = wt.peek(write_tar(tmp_path / "x.tar", rows))
    assert all(text in repr(shown) for text in ("a few words", "age: 3", "doc/3"))
    assert opened(shown.save(tmp_path / "s.png")).std() > 0


def test_tiny_images_are_enlarged_without_interpolation(tmp_path: Path) -> None:
    checks = Image.fromarray(((np.indices((8, 8)).sum(0) % 2) * 255).astype(np.uint8))
    shown = wt.peek(write_tar(tmp_path / "x.tar", [("a", {"png": encoded(checks, "PNG")})]))
    assert of_color(opened(shown.save(tmp_path / "s.png")), (0, 0, 0)) == 192 * 192 / 2


def test_a_sheet_of_many_samples_has_a_bounded_size(tmp_path: Path) -> None:
    rows = [(f"k{i:05d}", {"png": picture(i), "cls": b"%d" % i}) for i in range(300)]
    shown = wt.peek(write_tar(tmp_path / "x.tar", rows), 300, order="classes")
    assert len(set(labels(shown, "cls"))) == 300
    height, width, _ = opened(shown.save(tmp_path / "s.png")).shape
    assert width <= 4000
    assert width * height < 50e6


def test_a_sheet_has_a_line_for_each_class_if_classes_are_chosen(
    packed: Path, tmp_path: Path
) -> None:
    heights = [
        len(opened(wt.peek(packed, n, **options).save(tmp_path / "sheet.png")))
        for n, options in (
            (3, {"order": "classes"}),
            (4, {"classes": ["cat", "cat", "dog"]}),
            (12, {"order": "classes"}),
        )
    ]
    assert heights == sorted(set(heights))  # one, two and three lines: no class has two


def test_other_extensions_are_refused_and_a_failed_write_leaves_no_file(
    packed: Path, tmp_path: Path
) -> None:
    shown = wt.peek(packed, 2)
    with pytest.raises(wt.UsageError, match=r"must end in .png"):
        shown.save(tmp_path / "sheet.jpg")
    with pytest.raises(wt.StorageError, match="cannot be written"):
        shown.save(tmp_path / "absent" / "sheet.png")
    assert list(tmp_path.iterdir()) == []


def test_a_sheet_shows_the_caption_of_an_image(tmp_path: Path) -> None:
    tables, sheets = Tables(tmp_path), set()
    for caption in ("a red kite", "two boats on a lake at dawn"):
        tables(f"file,words\nIMG/0.png,{caption}")
        peeked = wt.peek(tables.out)
        assert caption in repr(peeked)
        sheets.add(opened(peeked.save(tmp_path / "sheet.png")).tobytes())
    assert len(sheets) == 2


@pytest.mark.parametrize(("classes", "mode"), [(12, "L"), (4, "L"), (12, "P")])
def test_a_sheet_shows_each_class_of_a_mask_in_its_own_color_and_names_it(
    tmp_path: Path, classes: int, mode: str
) -> None:
    stripes = np.repeat(np.arange(classes, dtype=np.uint8), 96 // classes)[:, None].repeat(96, 1)
    mask = Image.fromarray(stripes)
    if mode == "P":
        mask.putpalette([value for n in range(classes) for value in (n * 20, 255 - n * 20, 0)])
    black = Image.new("RGB", (96, 96))
    for kind, image in (("images", black), ("masks", mask)):
        (tmp_path / kind).mkdir()
        image.save(tmp_path / kind / "a.png")
    out = tmp_path / "set"
    wt.convert_folder(tmp_path / "images", out, flat=True, masks=tmp_path / "masks")
    peeked = wt.peek(out, 1)
    assert peeked[0].labels == {"mask.png": ", ".join(map(str, range(classes)))}
    drawn = peeked[0].pictures["mask.png"]
    middles = drawn[np.arange(classes) * (96 // classes) + 4, 48]
    assert len({*map(tuple, middles.tolist())}) == classes  # class 0 shows the image
    sheet = opened(peeked.save(tmp_path / "sheet.png")).reshape(-1, 3)
    assert all((np.abs(sheet.astype(int) - color).max(1) < 9).sum() >= 200 for color in middles)
    names = tuple(f"kind {n}" for n in range(classes))
    label = wt.Label("seg", "mask", "mask.png", None, names)
    named = wt.peek(replace(wt.open(out), labels=(label,)), 1)
    assert named[0].labels["mask.png"].startswith("kind 0, kind 1, kind 2")


def test_boxes_are_counted_selected_and_drawn_and_are_no_label_to_learn(tmp_path: Path) -> None:
    rng, out = np.random.default_rng(0), tmp_path / "set"
    scenes = [scene(rng, 60, 120, count) for count in (3, 0, 3, 1)]
    samples = [{"png": own.file("PNG"), "boxes.json": json.loads(own.member)} for own in scenes]
    label = wt.Label("boxes", "boxes", "boxes.json", classes=NAMES[::-1])  # drawn in other colors
    wt.pack(samples, out, labels=[label], shuffle=False)
    info = wt.info(out)
    assert info.labels[0].summary == "boxes of 3 classes: blue, green, red"
    assert [(column.name, column.classes) for column in info.columns] == [
        ("boxes.json.labels", {"red": 3, "green": 2, "blue": 2})
    ]
    assert len(wt.open(out).where("'green' in `boxes.json.labels`")) == 2
    for own, view in zip(scenes, wt.peek(out), strict=True):
        changed = (view.pictures["png"] != own.pixels).any(-1)
        for x0, y0, x1, y1 in np.array(own.boxes, int).reshape(-1, 4):
            edge = np.zeros_like(changed)
            edge[y0:y1, [x0, x1 - 1]] = edge[[y0, y1 - 1], x0:x1] = True
            assert changed[edge].mean() > 0.9
        assert changed.any() == bool(own.boxes)
    with pytest.raises(wt.UsageError, match="label 'boxes' cannot be learned: it is of kind boxes"):
        wt.train(out, out=tmp_path / "run")


# --- the verb ---


def test_show_writes_a_sheet_or_prints_a_table(packed: Path, tmp_path: Path, capsys: Any) -> None:
    sheet = tmp_path / "s.png"
    assert main(["show", str(packed), "-o", str(sheet), "-n", "6", "--random"]) == 0
    assert sheet.stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "6 of 60 samples" in printed
    assert str(sheet) in printed
    assert main(["show", str(packed), "-n", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert all(sample.key in "\n".join(lines) for sample in wt.peek(packed, 30))


def test_show_lists_shown_and_broken_samples(packed: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["show", str(packed), "--json", "--class", "owl,cat", "-n", "2"]
    assert main([*words, "-o", str(tmp_path / "s.png")]) == 0
    document = json.loads(capsys.readouterr().out)
    counts = [document[name] for name in ("shown", "broken", "file")]
    assert counts == [4, 0, str(tmp_path / "s.png")]
    names = [sample["labels"]["label"] for sample in document["samples"]]
    assert names == ["owl", "owl", "cat", "cat"]
    assert document["samples"][0]["pictures"] == ["png"]
    rows = [("a", {"png": b"no", "cls": b"1"}), ("bad\udce9", {"png": picture(1)})]
    assert main(["show", str(write_tar(tmp_path / "x.tar", rows)), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["broken"] == 1
    assert "'a' at offset 0: png: no image of a known format" in printed.err
