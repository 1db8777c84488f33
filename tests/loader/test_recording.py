"""`Loader.record` and `Loader.recorded`, and epochs whose weights are recorded values.

A model in plain Python keeps the mean of each sample in its newest epoch, and computes the weights
of the next epoch. It shares no code with the package.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import wdstrain as wt
from tests.conftest import write_picture_shards, write_shards, write_tar
from tests.support.children import Program

COUNT = 21
FIELDS = {"label": wt.label()}


def loss_of(number: int, epoch: int) -> float:
    return (number * 5 % 8) / 4 + 0.5**epoch


def number_of(key: str) -> int:
    return int(key[1:])


@dataclass
class Model:
    """What is known of each sample, by key: values of its newest epoch, and all of them."""

    epochs: dict[str, int] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    times: Counter[str] = field(default_factory=Counter)
    smoothed: dict[str, float] = field(default_factory=dict)

    def record(self, key: str, epoch: int, value: float) -> None:
        if self.epochs.get(key) != epoch:
            self.epochs[key], self.values[key] = epoch, []
        self.values[key].append(value)
        self.times[key] += 1

    def mean(self, key: str) -> float:
        return float(np.float32(sum(self.values[key]) / len(self.values[key])))

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"key": k, "epoch": self.epochs[k], "times": self.times[k], "loss": self.mean(k)}
            for k in sorted(self.values)
        ]

    def weights(self, keys: list[str], epoch: int) -> dict[str, float]:
        """Return the weights of the epoch that begins after `epoch`."""
        for key in self.values:
            if self.epochs[key] == epoch and math.isfinite(value := self.mean(key)):
                self.smoothed[key] = (self.smoothed.get(key, value) + value) / 2
        mean = sum(self.smoothed.values()) / len(self.smoothed)
        return {key: 0.1 + 0.9 * self.smoothed.get(key, mean) / mean for key in keys}


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a table, with NaN as a text, which equals itself."""
    rows: list[dict[str, Any]] = table.to_pylist()
    return [{n: "nan" if v != v else v for n, v in row.items()} for row in rows]


def train(
    loader: wt.Loader, epoch: int, model: Model | None = None, growth: float = 0
) -> Iterator[list[str]]:
    """Record the losses of an epoch but those of the first batch of epoch 1. Yield the keys.

    growth: of the losses from batch to batch.
    """
    for step, batch in enumerate(loader):
        losses = [loss_of(number_of(key), epoch) + growth * step for key in batch["__key__"]]
        if (epoch, step) != (1, 0):
            loader.record(batch, loss=losses)
            valid = batch["__valid__"].tolist() if "__valid__" in batch else [True] * len(losses)
            for key, value, is_valid in zip(batch["__key__"], losses, valid, strict=True):
                if model is not None and is_valid:
                    model.record(key, epoch, value)
        yield batch["__key__"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tail", ["drop", "pad", "keep"])
def test_recorded_values_are_those_of_the_model(shards: Path, workers: int, tail: Any) -> None:
    """Samples of weight 3 occur three times in an epoch: the mean counts. Weight 0: never."""
    model, weights = Model(), [3.0, 0.0, 1.0] * 7
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "tail": tail}
    with wt.Loader(shards, FIELDS, weights=weights, **options) as loader:
        assert loader.recorded().num_rows == 0
        for epoch in range(3):
            list(train(loader, epoch, model, growth=0.25))
            table = loader.recorded()
            assert table.column_names == ["key", "epoch", "times", "loss"]
            assert rows_of(table) == model.rows()
    assert max(model.times.values()) > 6
    assert min(map(number_of, model.times)) == 0
    assert not any(number_of(key) % 3 == 1 for key in model.times)


@pytest.mark.parametrize(
    "form",
    [
        lambda values: tuple(values),
        lambda values: np.array(values, np.float16),
        lambda values: torch.tensor(values, dtype=torch.bfloat16),
        lambda values: torch.tensor(values, requires_grad=True) * 2,
        lambda values: torch.tensor(values) > 1,
        lambda values: [torch.tensor(value) for value in values],
    ],
    ids=["tuple", "float16", "bfloat16", "with a gradient", "flags", "tensors"],
)
def test_values_have_any_form_of_one_number_per_row(
    shards: Path, form: Callable[[list[float]], Any]
) -> None:
    values = [0.5, 1.5, -2.0, 0.0]
    expected = torch.as_tensor(form(values)).tolist()
    with wt.Loader(shards, FIELDS, batch_size=4, shuffle=False) as loader:
        loader.record(next(iter(loader)), a=form(values))
        assert loader.recorded().column("a").to_pylist() == expected


def test_columns_have_the_values_of_the_newest_epoch_and_nan_and_infinity_stay(
    shards: Path,
) -> None:
    with wt.Loader(shards, FIELDS, batch_size=3, shuffle=False) as loader:
        batches = iter(loader)
        loader.record(next(batches), a=[1, 2, 3])
        loader.record(next(batches), a=[math.nan, math.inf, -math.inf], b=[1e300, 5, 6])
        loader.record(next(batches), b=[7, 8, 9])
        table = loader.recorded()
        loader.record(next(iter(loader)), b=[10] * 3)
        newest = loader.recorded().select(["epoch", "a", "b"])
    assert rows_of(newest)[:3] == [{"epoch": 1, "a": None, "b": 10}] * 3
    assert table.column("key").to_pylist() == [f"s{n:06d}" for n in range(9)]
    assert rows_of(table.select(["a", "b"])) == [
        *({"a": value, "b": None} for value in (1, 2, 3)),
        *({"a": "nan", "b": math.inf}, {"a": math.inf, "b": 5}, {"a": -math.inf, "b": 6}),
        *({"a": None, "b": value} for value in (7, 8, 9)),
    ]
    assert {str(table.schema.field(n).type) for n in "ab"} == {"float"}


@pytest.mark.parametrize("on_error", ["replace", "mark"])
def test_a_row_without_its_own_sample_is_not_recorded(tmp_path: Path, on_error: Any) -> None:
    bad = {3, 4, 11}
    shards = write_picture_shards(tmp_path, [10, 10], bad)
    fields = {"image": wt.image(size=8), "label": wt.label()}
    options: dict[str, Any] = {"on_error": on_error, "max_errors": 1.0, "tail": "pad"}
    with wt.Loader(shards, fields, batch_size=8, **options) as loader:
        for batch in loader:
            loader.record(batch, loss=torch.ones(8))
        table = loader.recorded()
    assert [number_of(key) for key in table.column("key").to_pylist()] == [
        number for number in range(20) if number not in bad
    ]
    assert set(table.column("times").to_pylist()) == {1}


def test_a_copied_batch_and_the_last_batch_after_the_loop_can_be_recorded(shards: Path) -> None:
    with wt.Loader(shards, FIELDS, batch_size=4) as loader:
        for batch in wt.to_device(loader, "cpu"):
            loader.record(batch, loss=batch["label"].double())
        assert loader.recorded().num_rows == 20
        loader.record(batch := next(iter(loader)), loss=batch["label"])
        assert Counter(loader.recorded().column("epoch").to_pylist())[1] == 4


def test_a_selection_and_a_mixture_are_recorded_by_their_own_samples(tmp_path: Path) -> None:
    a, b = (wt.index(write_shards(tmp_path / name, [9])) for name in "ab")
    with wt.Loader(a, FIELDS, where="key > 's000004'", batch_size=2) as loader:
        list(train(loader, 0))
        assert len(loader.recorded()) == 4
    with wt.mix({"a": a, "b": b}, FIELDS, batch_size=6) as mixed:
        for batch in mixed:
            mixed.record(batch, source=[name == "b" for name in batch["__source__"]])
        table = mixed.recorded()
    assert len(table) == 18
    assert table.column("source").to_pylist() == [0] * 9 + [1] * 9


def test_a_loaded_state_begins_the_table_anew_and_a_copy_has_its_own(shards: Path) -> None:
    with wt.Loader(shards, FIELDS, batch_size=4) as loader:
        losses = train(loader, 0)
        assert len([next(losses) for _ in range(2)]) == 2
        for other in (pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
            assert other.recorded() == loader.recorded()
            other.record(next(iter(other)), score=[1] * 4)
            other.close()
            assert "score" in other.recorded().column_names
        assert loader.recorded().column_names == ["key", "epoch", "times", "loss"]
        loader.load_state_dict(loader.state_dict())
        assert loader.recorded().num_rows == 0


EACH = "loss is .* one number for each of the 4 rows"
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({}, "without values"),
    ({"loss": [1, 2, 3]}, r"loss is a list of shape \[3\]: .* one number for each of the 4 rows"),
    ({"loss": torch.tensor(1.0)}, r"loss is a Tensor of shape \[\]: .* reduction='none'"),
    *(({"loss": wrong}, EACH) for wrong in ([[1], [2, 3], 4, 5], ["a"] * 4)),
    ({"loss": torch.ones(4, dtype=torch.complex64)}, EACH),
    *(({name: [1] * 4}, f"'{name}'.*another name") for name in ("epoch", "cls", "a;b")),
]


def test_wrong_values_are_refused_with_one_clear_error(shards: Path) -> None:
    with wt.Loader(shards, FIELDS, batch_size=4) as loader:
        for values, message in ERRORS:
            batch = next(iter(loader))
            with pytest.raises(wt.UsageError, match=message):
                loader.record(batch, **values)
        for other in ([1], {"__key__": batch["__key__"][::-1]}):
            with pytest.raises(wt.UsageError, match="delivered last"):
                loader.record(other, a=[1] * 4)
        loader.record(batch, a=[1] * 4)
        with pytest.raises(wt.UsageError, match="this batch was recorded already"):
            loader.record(batch, a=[1] * 4)
        assert loader.recorded().column_names == ["key", "epoch", "times", "a"]
        with pytest.raises(wt.UsageError, match=r"epoch 1 .* values of epoch \d+"):
            loader.record(next(loader.epoch(1)), a=[1] * 4)


def test_a_sample_counts_each_time_that_anything_of_it_is_recorded(shards: Path) -> None:
    with wt.Loader(shards, FIELDS, batch_size=4) as loader:
        for name in ("a", "b"):
            for batch in loader:
                loader.record(batch, **{name: [1] * 4})
        for row in loader.recorded().to_pylist():
            assert (row["epoch"], row["times"], row["a"], row["b"]) in (
                (1, 2, None, 1),
                (1, 1, None, 1),
                (0, 1, 1, None),
            )


def test_a_recorded_table_joins_the_set_and_chooses_samples(tmp_path: Path) -> None:
    packed = tmp_path / "set"
    wt.pack(({"__key__": f"s{n:06d}", "cls": n % 3} for n in range(COUNT)), packed)
    with wt.Loader(packed, FIELDS, batch_size=4) as loader:
        list(train(loader, 0))
        table = loader.recorded()
    index = wt.open(packed).join(table, on="key")
    hard = index.where("loss >= 2 and times == 1 and epoch == 0")
    chosen = [key for key in table.column("key").to_pylist() if loss_of(number_of(key), 0) >= 2]
    assert chosen
    assert sorted(hard.keys(np.arange(len(hard)))) == sorted(chosen)
    assert wt.join(packed, table, on="key").matched == 20
    options: dict[str, Any] = {"where": "times > 0", "batch_size": 4}
    with wt.Loader(packed, FIELDS, weights="recorded:loss", **options) as loader:
        assert [len(list(train(loader, epoch))) for epoch in range(2)] == [5, 5]
    with wt.Loader(packed, FIELDS, weights="loss", **options) as loader:
        refused = r"is a column of the index.*weights='recorded:loss'"
        with pytest.raises(wt.UsageError, match=refused):
            list(train(loader, 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_drawn_in_proportion_to_the_smoothed_losses(shards: Path, workers: int) -> None:
    model, keys = Model(), [f"s{n:06d}" for n in range(COUNT)]
    weights, orders = dict.fromkeys(keys, 1.0), []
    options: dict[str, Any] = {"batch_size": 4, "tail": "keep", "num_workers": workers}
    with wt.Loader(shards, FIELDS, weights="loss", **options) as loader:
        for epoch in range(6):
            batches = list(train(loader, epoch, model))
            counts = Counter(chain.from_iterable(batches))
            assert len(batches) == len(loader) == 6
            assert counts.total() == COUNT
            assert loader.plan(epoch).weights == pytest.approx(list(weights.values()), rel=1e-6)
            for key, weight in weights.items():
                assert math.floor(weight - 1e-6) <= counts[key] <= math.ceil(weight + 1e-6)
            weights = model.weights(keys, epoch)
            planned = loader.plan(epoch).delivery(0, 0, len(loader)).ids
            assert loader.index.keys(planned) == list(chain.from_iterable(batches))
            orders.append(batches)
        assert rows_of(loader.recorded()) == model.rows()
        assert loader.report()["samples"] == COUNT
    assert max(weights.values()) > 1.5  # samples occur twice
    assert len({str(sorted(chain.from_iterable(order))) for order in orders[1:]}) > 1
    with wt.Loader(shards, FIELDS, weights="loss", **{**options, "num_workers": 1}) as other:
        assert orders == [list(train(other, epoch)) for epoch in range(6)]


def test_a_sample_without_a_finite_value_keeps_the_mean_weight(shards: Path) -> None:
    for value in (math.nan, math.inf, 0.0):
        with wt.Loader(shards, FIELDS, weights="loss", batch_size=7) as loader:
            for batch in chain(loader, loader):
                loader.record(batch, loss=[value] * 7)
            assert set(loader.recorded().column("times").to_pylist()) == {2}
    with wt.Loader(shards, FIELDS, weights="loss", batch_size=7) as loader:
        for batch in loader:
            losses = [math.nan if n < 7 else 10.0 * (n == 7) for n in batch["label"]]
            loader.record(batch, loss=losses)
        numbers = Counter(n for batch in train(loader, 1) for n in map(number_of, batch))
    assert all(numbers[n] == 1 for n in range(7))  # of weight 1
    assert numbers[7] == 7 - sum(numbers[n] for n in range(8, 21)) + 7


@pytest.mark.parametrize(
    ("stop", "workers"), [((0, 3), (0, 2)), ((1, 0), (2, 0)), ((2, 4), (0, 0)), ((3, 1), (0, 2))]
)
def test_a_resumed_run_has_the_order_and_the_values_of_an_undisturbed_one(
    shards: Path, stop: tuple[int, int], workers: tuple[int, int]
) -> None:
    options: dict[str, Any] = {"weights": "loss", "batch_size": 4, "tail": "pad"}
    with wt.Loader(shards, FIELDS, **options) as loader:
        whole = [list(train(loader, epoch)) for epoch in range(5)]
        table = loader.recorded()
    with wt.Loader(shards, FIELDS, num_workers=workers[0], **options) as loader:
        got = [list(train(loader, epoch)) for epoch in range(stop[0])]
        batches = train(loader, stop[0])
        got.append([next(batches) for _ in range(stop[1])])
        state = json.loads(json.dumps(loader.state_dict()))
        copied = pickle.loads(pickle.dumps(loader))
    assert got == [*whole[: stop[0]], whole[stop[0]][: stop[1]]]
    with wt.Loader(shards, FIELDS, num_workers=workers[1], **options) as resumed:
        next(train(resumed, 0))  # which the state replaces
        resumed.load_state_dict(state)
        for again in (resumed, copied):
            rest = [list(train(again, epoch)) for epoch in range(stop[0], 5)]
            assert rest == [whole[stop[0]][stop[1] :], *whole[stop[0] + 1 :]]
            assert again.recorded() == table
    copied.close()


def test_the_plans_of_epoch_0_and_of_the_newest_epoch_are_known_and_no_others(shards: Path) -> None:
    with wt.Loader(shards, FIELDS, weights="loss", batch_size=4) as loader:
        with pytest.raises(wt.UsageError, match="epoch 1 .* when it begins"):
            loader.plan(1)
        first = loader.plan(0).delivery(0, 0, 5).ids.tolist()
        for epoch in range(4):
            list(train(loader, epoch))
        assert len(list(loader.epoch(3))) == 5  # it can be read again
        assert loader.plan(0).delivery(0, 0, 5).ids.tolist() == first
        for call in (loader.plan, lambda number: next(loader.epoch(number))):
            with pytest.raises(wt.UsageError, match="epoch 1 .* newest epoch, 3"):
                call(1)


def test_an_epoch_with_larger_samples_than_the_first_is_delivered(tmp_path: Path) -> None:
    samples = [(f"k{n:03d}", {"txt": b"x" * (200_000 if n < 3 else 10)}) for n in range(300)]
    write_tar(tmp_path / "a.tar", samples)
    with wt.Loader(tmp_path, {"txt": wt.text()}, weights="length", batch_size=30) as loader:
        for epoch in range(3):
            long = 0
            for batch in loader:
                lengths = [len(text) for text in batch["txt"]]
                loader.record(batch, length=lengths)
                long += sum(length > 10 for length in lengths)
            assert long == 3 if epoch == 0 else 250 < long < 290


WEIGHT_ERRORS: list[tuple[dict[str, Any], Any, str]] = [
    ({"weights": "lose"}, [1.0] * 4, "weights='lose': nothing was.*columns are label, often"),
    ({"weights": "loss"}, [1.0, -0.5, 1.0, 1.0], "-0.5 .* 'k001'.*must be >= 0"),
    ({"weights": "loss", "world_size": 2, "rank": 0}, [1.0] * 4, "torch.distributed"),
    ({"weights": "a;b"}, [1.0] * 4, "there is no column 'a;b'"),
    ({"weights": ""}, [1.0] * 4, "not the name of a column"),
    ({"weights": "loss", "balance": "cls"}, [1.0] * 4, "both given"),
    ({"weights": "loss", "buckets": "cls"}, [1.0] * 4, "buckets was given with weights"),
]


@pytest.mark.parametrize(("options", "losses", "message"), WEIGHT_ERRORS)
def test_weights_that_cannot_be_drawn_end_in_one_clear_error(
    tmp_path: Path, options: dict[str, Any], losses: list[float], message: str
) -> None:
    rows = ({"__key__": f"k{n:03d}", "cls": n % 2, "json": {"often": n % 3}} for n in range(COUNT))
    wt.pack(rows, tmp_path, shuffle=False)

    def two_epochs() -> None:
        with wt.Loader(tmp_path, FIELDS, batch_size=4, shuffle=False, **options) as loader:
            for batch in chain(loader, loader):
                loader.record(batch, loss=losses)

    with pytest.raises(wt.UsageError, match=message):
        two_epochs()


def test_a_state_of_other_weights_or_without_values_is_refused(shards: Path) -> None:
    recorded = wt.Loader(shards, FIELDS, weights="loss", batch_size=4)
    list(train(recorded, 0))
    state = json.loads(json.dumps(recorded.state_dict()))
    for weights in (None, "score"):
        with pytest.raises(wt.UsageError, match="weights w"):
            wt.Loader(shards, FIELDS, weights=weights, batch_size=4).load_state_dict(state)
    cut = {**state["recorded"], "columns": {"loss": "eJwDAAAAAAE="}}
    wrong: list[Any] = [{"epoch": 0}, [], cut]
    for broken in wrong:
        with pytest.raises(wt.UsageError, match="holds no recorded values"):
            recorded.load_state_dict({**state, "recorded": broken})
    recorded.load_state_dict(state)
    assert len(list(train(recorded, 1))) == 5
    recorded.close()


RANK = """
import json, sys
import torch.distributed as dist
import wdstrain as wt
from tests.loader.test_recording import FIELDS, rows_of, train

rank, world, meeting, folder, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
begin, end, stop = json.loads(sys.argv[6])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
options = {"batch_size": 4 // world, "lanes": 2, "weights": "loss", "tail": "pad"}
with wt.Loader(folder, FIELDS, num_workers=rank, **options) as loader:
    if begin:
        loader.load_state_dict(json.load(open(out)))
    epochs = [list(train(loader, epoch)) for epoch in range(*([0, end] if not begin else begin))]
    if stop is not None:
        batches = train(loader, end)
        epochs.append([next(batches) for _ in range(stop)])
        state = loader.state_dict()
        if rank == 0:
            json.dump(state, open(out, "w"))
    print(json.dumps([epochs, rows_of(loader.recorded())]))
dist.destroy_process_group()
"""


def run_ranks(world: int, folder: Path, out: Path, *position: Any) -> tuple[list[Any], Any]:
    """Return the keys of each global batch by epoch, in order, and the recorded rows of all ranks."""
    meeting = out.with_name(f"meeting-{world}-{position}".replace(" ", ""))
    words = [world, meeting, folder, out, json.dumps(position)]
    programs = [Program(RANK, rank, *words) for rank in range(world)]
    ended = [program.end() for program in programs]
    assert [rank.status for rank in ended] == [0] * world, ended
    printed = [json.loads(rank.out) for rank in ended]
    assert all(rows == printed[0][1] for _, rows in printed)
    epochs = [
        [list(chain.from_iterable(step)) for step in zip(*ranks, strict=True)]
        for ranks in zip(*(epochs for epochs, _ in printed), strict=True)
    ]
    return epochs, printed[0][1]


def test_ranks_draw_the_same_epochs_as_one_and_resume_on_another_number(tmp_path: Path) -> None:
    """State and table are those of all ranks. With fixed lanes the global batches are the same."""
    shards = write_shards(tmp_path / "shards", [7, 13, 1])
    whole, rows = run_ranks(1, shards, tmp_path / "none", None, 5, None)
    assert run_ranks(2, shards, tmp_path / "none", None, 5, None) == (whole, rows)
    assert any(row["times"] > 5 for row in rows)
    for first, second in ((2, 2), (2, 1), (1, 2)):
        state = tmp_path / f"state-{first}-{second}"
        before, _ = run_ranks(first, shards, state, None, 2, 3)
        after, again = run_ranks(second, shards, state, [2, 5], 5, None)
        assert before == [*whole[:2], whole[2][:3]]
        assert after == [whole[2][3:], *whole[3:]]
        assert again == rows
