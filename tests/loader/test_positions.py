"""The position of a loop: states, copies of a loader, and refused numbers."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import keys_of, write_tar

Make = Callable[..., wt.Loader]


def position(loader: wt.Loader) -> tuple[int, int]:
    """Return the epoch and step of the state."""
    state = loader.state_dict()
    return state["epoch"], state["step"]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.fixture
def bad_set(tmp_path: Path) -> Make:
    """Return a function that writes a shard of numbers, some of them bad, and makes its loader."""

    def make(count: int, bad: set[int], max_errors: float, **options: Any) -> wt.Loader:
        numbers = ((i, b"x" if i in bad else b"%d" % i) for i in range(count))
        if not (tmp_path / "a.tar").exists():
            write_tar(tmp_path / "a.tar", [(f"k{i:04d}", {"val": data}) for i, data in numbers])
        options = {"batch_size": 10, "shuffle": False, "on_error": "replace", **options}
        return wt.Loader(tmp_path, {"y": wt.number("val")}, max_errors=max_errors, **options)

    return make


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_refused_for_bad_samples_does_not_count(bad_set: Make, num_workers: int) -> None:
    strict = bad_set(100, {57}, 0.0, num_workers=num_workers)
    batches = iter(strict)
    assert len(list(islice(batches, 5))) == 5
    refused = "1 of the 100 samples of epoch 0 are bad, more than max_errors=0.0"
    with pytest.raises(wt.SampleError, match=refused):
        next(batches)
    state, report = strict.state_dict(), strict.report()
    strict.close()
    assert state["step"] == report["batches"] == 5
    assert (report["samples"], report["bad"]) == (50, 1)
    with bad_set(100, {57}, 1.0, num_workers=num_workers) as lenient:
        lenient.load_state_dict(state)
        assert len(keys_of(lenient)) == 5


@pytest.mark.parametrize("at", [10, 99])
def test_a_resume_keeps_the_count_of_bad_samples_of_the_epoch(bad_set: Make, at: int) -> None:

    def deliver(passed: wt.Loader, steps: int | None = None) -> tuple[int, str]:
        count = 0
        try:
            for _ in islice(passed, steps):
                count += 1
        except wt.SampleError as error:
            return count, str(error).split(" are bad")[0]
        return count, ""

    for max_errors in (0.0, 0.001, 0.004, 0.005):
        first, second, whole = (
            bad_set(1000, {103, 255, 961, 964, 985}, max_errors) for _ in range(3)
        )
        uninterrupted, why = deliver(whole)
        before, _ = deliver(first, at)
        second.load_state_dict(through_json(first.state_dict()))
        after, error = deliver(second)
        assert (before + after, error) == (uninterrupted, why), max_errors
        following = [] if why else keys_of(second)
        assert len(following) == (0 if why else 100)  # the count restarts with the next epoch


def test_a_state_of_the_end_of_an_epoch_counts_bad_samples_anew(bad_set: Make) -> None:
    with bad_set(100, {3, 57}, 0.02, shuffle=True) as first:
        assert len(keys_of(first)) == 10
        state = through_json(first.state_dict())
    with bad_set(100, {3, 57}, 0.02, shuffle=True) as second:
        second.load_state_dict(state)
        assert len(keys_of(second)) == 10
        assert second.report()["bad"] == 2


def test_bad_samples_of_another_rank_do_not_count(bad_set: Make) -> None:
    first, second = (bad_set(100, {1, 2}, 0.05, rank=rank, world_size=2) for rank in range(2))
    for _ in islice(first, 2):
        pass
    state = first.state_dict()
    assert state["bad"] == 2
    second.load_state_dict(state)
    assert second.state_dict()["bad"] == 0
    assert len(keys_of(second)) == 3


def test_a_state_of_other_samples_is_refused_although_they_are_as_many(tmp_path: Path) -> None:
    for name, key in (("a", "k"), ("b", "l")):
        write_tar(tmp_path / name / "a.tar", [(f"{key}{i}", {"txt": b"x"}) for i in range(8)])
    first, second = (wt.Loader(tmp_path / name, batch_size=2) for name in "ab")
    next(iter(first))
    with pytest.raises(wt.UsageError, match="data"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize(("step", "device"), [(1, False), (3, True), (5, False), (5, True)])
def test_set_epoch_in_a_loop_applies_to_the_next(shards: Path, step: int, device: bool) -> None:
    plain, loader, resumed = (wt.Loader(shards, batch_size=4) for _ in range(3))
    epochs = {number: keys_of(plain.epoch(number)) for number in (0, 7)}
    delivered = list[list[str]]()
    for taken, batch in enumerate(wt.to_device(loader, "cpu") if device else loader, start=1):
        delivered.append(batch["__key__"])
        if taken == step:
            loader.set_epoch(7)
            state = loader.state_dict()
    assert delivered == epochs[0]
    assert position(loader) == (7, 0)
    assert keys_of(loader) == epochs[7]
    resumed.load_state_dict(state)
    assert keys_of(resumed) == (epochs[0][step:] if step < 5 else epochs[7])


def test_a_loaded_state_is_the_position_until_a_loop_or_another_epoch_begins(shards: Path) -> None:
    """Trainers call `set_epoch` before every epoch, also after a resume."""
    plain, loader = wt.Loader(shards, batch_size=4), wt.Loader(shards, batch_size=4)
    state = {**loader.state_dict(), "epoch": 1, "step": 2}
    loader.load_state_dict(state)
    batches = iter(loader)
    assert loader.state_dict() == state
    loader.set_epoch(1)
    assert loader.state_dict() == state
    assert keys_of(batches) == keys_of(plain.epoch(1, start=2))
    loader.load_state_dict(state)
    loader.set_epoch(0)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(state)  # within a loop
    next(batches)
    assert position(loader) == loader.next_position == (1, 2)
    assert keys_of(loader) == keys_of(plain.epoch(1, start=2))


@pytest.mark.parametrize("of", [int, np.int64, np.uint8, torch.tensor])
def test_integers_of_any_type_are_accepted_and_states_are_json(shards: Path, of: Any) -> None:
    sizes = {"batch_size": 4, "seed": 3, "shuffle_buffer": 9, "lanes": 2, "num_workers": 0}
    plain = wt.Loader(shards, **sizes)
    options = {name: of(value) for name, value in sizes.items()}
    loader = wt.Loader(shards, rank=of(0), world_size=of(1), **options)
    loader.set_epoch(of(2))
    assert keys_of(loader) == keys_of(plain.epoch(2))
    assert keys_of(loader.epoch(of(1), start=of(2))) == keys_of(plain.epoch(1, start=2))
    state = loader.state_dict()
    assert through_json(state) == state
    loader.load_state_dict({**state, "epoch": of(5), "step": of(1)})
    assert through_json(loader.state_dict()) == {**state, "epoch": 5, "step": 1}
    assert keys_of(loader) == keys_of(plain.epoch(5, start=1))


NUMBERS = ("seed", "batch_size", "num_workers", "shuffle_buffer", "lanes", "rank", "cache_limit")


@pytest.mark.parametrize("value", [1.0, True, "1", [1]])
def test_values_that_are_not_integers_are_refused(shards: Path, tmp_path: Path, value: Any) -> None:
    loader = wt.Loader(shards, batch_size=4)
    with pytest.raises(wt.UsageError, match=r"^epoch=.*: must be an integer >= 0\."):
        loader.set_epoch(value)
    for name in NUMBERS[: -1 if value == "1" else None]:  # sizes may be strings
        options = {"batch_size": 4, "cache_dir": tmp_path / "cache", name: value}
        options |= {"world_size": 1} if name == "rank" else {}
        with pytest.raises(wt.UsageError, match=f"^{name}=.*: must be an integer"):
            wt.Loader(shards, **options)


def test_wrong_positions_are_refused(shards: Path) -> None:
    loader = wt.Loader(shards, batch_size=4)
    state = loader.state_dict()
    headless = {name: value for name, value in state.items() if name != "epoch"}
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: loader.set_epoch(-1), "epoch=-1: must be an integer >= 0"),
        (lambda: loader.epoch(0, start=5), "an epoch has 5 steps"),
        (lambda: loader.load_state_dict({**state, "step": 99}), "must be below 5"),
        (lambda: loader.load_state_dict({**state, "epoch": "x"}), "this state holds no position"),
        (lambda: loader.load_state_dict(headless), "this state holds no position"),
        (lambda: loader.epoch(0).delivered, "no batch was delivered yet"),
    ]
    for call, message in calls:
        with pytest.raises(wt.UsageError, match=message):
            call()


def test_copying_a_pass_raises_and_suggests_copying_the_loader(shards: Path) -> None:
    refused = r"cannot be pickled or copied.*Pickle the loader, or save loader\.state_dict\(\)"
    with wt.Loader(shards, batch_size=4) as loader:
        batches = iter(loader)
        for _ in range(2):  # before the first batch, and after it
            for how in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(wt.UsageError, match=refused):
                    how(batches)
            assert next(batches)
