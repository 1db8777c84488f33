"""The position of a loop: states, copies of a loader, and refused numbers."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdstrain as wt
from tests.conftest import write_shards, write_tar

Make = Callable[..., wt.Loader]


def keys(loader: Iterable[dict[str, Any]]) -> list[list[str]]:
    return [batch["__key__"] for batch in loader]


def numbers(folder: Path, count: int, bad: set[int]) -> Path:
    """Write a shard with a number in each sample except the bad ones."""
    write_tar(
        folder / "a.tar",
        [(f"k{i:04d}", {"val": b"x" if i in bad else b"%d" % i}) for i in range(count)],
    )
    return folder


# --- bad samples and the position ---


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_refused_for_bad_samples_is_not_counted_as_delivered(
    tmp_path: Path, num_workers: int
) -> None:
    folder = numbers(tmp_path / "s", 100, {57})

    def loader(**options: Any) -> wt.Loader:
        fields = {"y": wt.number("val")}
        return wt.Loader(
            folder,
            fields,
            batch_size=10,
            shuffle=False,
            on_error="replace",
            num_workers=num_workers,
            **options,
        )

    strict = loader(max_errors=0.0)
    batches = iter(strict)
    assert len(list(islice(batches, 5))) == 5
    with pytest.raises(
        wt.SampleError, match="1 of the 100 samples of epoch 0 are bad, more than max_errors=0.0"
    ):
        next(batches)
    state, report = strict.state_dict(), strict.report()
    strict.close()
    assert state["step"] == report["batches"] == 5
    assert report["samples"] == 50
    assert report["bad"] == 1
    lenient = loader(max_errors=1.0)
    lenient.load_state_dict(state)
    assert len(keys(lenient)) == 5
    lenient.close()


@pytest.mark.parametrize("at", [10, 99])
def test_a_resume_keeps_the_count_of_bad_samples_of_the_epoch(tmp_path: Path, at: int) -> None:
    """A resumed pass fails at the same batch as an undisturbed pass."""
    bad = {103, 255, 961, 964, 985}

    def loader(max_errors: float) -> wt.Loader:
        fields = {"y": wt.number("val")}
        return wt.Loader(
            tmp_path,
            fields,
            batch_size=10,
            shuffle=False,
            on_error="replace",
            max_errors=max_errors,
        )

    def deliver(passed: wt.Loader, steps: int | None = None) -> tuple[int, str]:
        count = 0
        try:
            for _ in islice(passed, steps):
                count += 1
        except wt.SampleError as error:
            return count, str(error)
        return count, ""

    numbers(tmp_path, 1000, bad)
    for max_errors in (0.0, 0.001, 0.004, 0.005, 1.0):
        uninterrupted, why = deliver(loader(max_errors))
        first = loader(max_errors)
        before, _ = deliver(first, at)
        second = loader(max_errors)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        after, error = deliver(second)
        assert before + after == uninterrupted, max_errors
        assert error.split(" are bad")[0] == why.split(" are bad")[0]
        following = keys(second) if not why else []
        assert len(following) == (100 if not why else 0)  # the count restarts with the next epoch


def test_a_state_of_the_end_of_an_epoch_counts_bad_samples_anew(tmp_path: Path) -> None:
    numbers(tmp_path, 100, {3, 57})

    def loader() -> wt.Loader:
        fields = {"y": wt.number("val")}
        return wt.Loader(tmp_path, fields, batch_size=10, on_error="replace", max_errors=0.02)

    first, second = loader(), loader()
    assert len(keys(first)) == 10
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert len(keys(second)) == 10
    assert second.report()["bad"] == 2


def test_a_state_of_other_samples_is_refused_although_they_are_as_many(tmp_path: Path) -> None:
    for name, key in (("a", "k"), ("b", "l")):
        write_tar(tmp_path / name / "a.tar", [(f"{key}{i}", {"txt": b"x"}) for i in range(8)])
    first, second = (wt.Loader(tmp_path / name, batch_size=2) for name in "ab")
    next(iter(first))
    with pytest.raises(wt.UsageError, match="data"):
        second.load_state_dict(first.state_dict())


def test_bad_samples_of_another_rank_do_not_count(tmp_path: Path) -> None:
    numbers(tmp_path, 100, {1, 2})

    def rank(number: int) -> wt.Loader:
        options: dict[str, Any] = {
            "batch_size": 10,
            "shuffle": False,
            "on_error": "replace",
            "max_errors": 0.05,
        }
        return wt.Loader(tmp_path, {"y": wt.number("val")}, rank=number, world_size=2, **options)

    first, second = rank(0), rank(1)
    for _ in islice(first, 2):
        pass
    state = first.state_dict()
    assert state["bad"] == 2
    second.load_state_dict(state)
    assert second.state_dict()["bad"] == 0
    assert len(keys(second)) == 3


# --- set_epoch, break and states ---


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("step", [1, 3, 5])
def test_set_epoch_in_a_loop_applies_to_the_next_loop(
    shards: Path, step: int, device: bool
) -> None:
    plain, loader = wt.Loader(shards, batch_size=4), wt.Loader(shards, batch_size=4)
    epochs = [[batch["__key__"] for batch in plain.epoch(number)] for number in range(8)]
    delivered = list[list[str]]()
    for taken, batch in enumerate(wt.to_device(loader, "cpu") if device else loader, start=1):
        delivered.append(batch["__key__"])
        if taken == step:
            loader.set_epoch(7)
            state = loader.state_dict()
    begun = loader.state_dict()
    assert delivered == epochs[0]
    assert (begun["epoch"], begun["step"]) == (7, 0)
    assert keys(loader) == epochs[7]
    resumed = wt.Loader(shards, batch_size=4)
    resumed.load_state_dict(state)
    assert keys(resumed) == (epochs[0][step:] if step < 5 else epochs[7])


@pytest.mark.parametrize("step", [1, 2, 5])
def test_set_epoch_after_a_break_sets_the_next_epoch_and_the_state(shards: Path, step: int) -> None:
    loader = wt.Loader(shards, batch_size=4)
    for _ in islice(loader, step):
        pass
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == ((0, step) if step < 5 else (1, 0))
    assert loader.next_position == (1, 0)
    loader.set_epoch(3)
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == loader.next_position == (3, 0)


def test_set_epoch_keeps_the_step_of_a_state_of_that_epoch(shards: Path) -> None:
    """Trainers call `set_epoch` before every epoch, also after a resume."""
    plain, loader = wt.Loader(shards, batch_size=4), wt.Loader(shards, batch_size=4)
    state = {**loader.state_dict(), "epoch": 1, "step": 2}
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert keys(loader) == [batch["__key__"] for batch in plain.epoch(1, start=2)]
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert keys(loader) == keys(plain.epoch(0))


def test_state_dict_returns_a_state_loaded_within_a_loop(shards: Path) -> None:
    loader = wt.Loader(shards, batch_size=4)
    other = {**loader.state_dict(), "epoch": 3, "step": 2}
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(other)
    next(batches)
    assert (
        (loader.state_dict()["epoch"], loader.state_dict()["step"])
        == loader.next_position
        == (3, 2)
    )
    assert len(keys(loader)) == 3


# --- numbers ---

INTEGERS = {"int": int, "np.int64": np.int64, "np.uint8": np.uint8, "torch": torch.tensor}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_of_any_type_are_accepted_and_states_are_json(shards: Path, kind: str) -> None:
    of = INTEGERS[kind]
    plain = wt.Loader(shards, batch_size=4, seed=3, shuffle_buffer=9, lanes=2)
    options: dict[str, Any] = {
        "batch_size": of(4),
        "seed": of(3),
        "shuffle_buffer": of(9),
        "lanes": of(2),
    }
    loader = wt.Loader(shards, rank=of(0), world_size=of(1), num_workers=of(0), **options)
    loader.set_epoch(of(2))
    assert keys(loader) == [batch["__key__"] for batch in plain.epoch(2)]
    assert [batch["__key__"] for batch in loader.epoch(of(1), start=of(2))] == [
        batch["__key__"] for batch in plain.epoch(1, start=2)
    ]
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    loader.load_state_dict({**state, "epoch": of(5), "step": of(1)})
    assert json.loads(json.dumps(loader.state_dict())) == {**state, "epoch": 5, "step": 1}
    assert keys(loader) == [batch["__key__"] for batch in plain.epoch(5, start=1)]


@pytest.mark.parametrize(
    "name", ["seed", "batch_size", "num_workers", "shuffle_buffer", "lanes", "rank", "cache_limit"]
)
@pytest.mark.parametrize("value", [1.0, True, "1", np.float64(1), [1], float("nan")])
def test_values_that_are_not_integers_are_refused(
    shards: Path, tmp_path: Path, name: str, value: Any
) -> None:
    if name == "cache_limit" and value == "1":
        return  # sizes may be strings
    options = (
        {name: value}
        | ({"world_size": 1} if name == "rank" else {})
        | {"cache_dir": tmp_path / "cache"}
    )
    with pytest.raises(wt.UsageError, match=f"^{name}=.*: must be an integer"):
        wt.Loader(shards, **{"batch_size": 4, **options})
    with pytest.raises(wt.UsageError, match=r"^epoch=.*: must be an integer >= 0\."):
        wt.Loader(shards, batch_size=4).set_epoch(value)


def test_set_epoch_refuses_a_wrong_epoch(shards: Path) -> None:
    loader = wt.Loader(shards, batch_size=4)
    with pytest.raises(wt.UsageError, match="epoch=-1: must be an integer >= 0"):
        loader.set_epoch(-1)
    with pytest.raises(wt.UsageError, match="start=-1: must be an integer >= 0"):
        loader.epoch(0, start=-1)
    with pytest.raises(wt.UsageError, match="an epoch has 5 steps"):
        loader.epoch(0, start=5)


@pytest.mark.parametrize("seed", [1.0, True, None, "1"])
def test_every_function_with_a_seed_requires_an_integer(
    shards: Path, tmp_path: Path, seed: Any
) -> None:
    samples = [{"__key__": str(i), "txt": b"x"} for i in range(3)]
    for call in (
        lambda: wt.pack(samples, tmp_path / "out", seed=seed),
        lambda: wt.peek(shards, 2, order="random", seed=seed),
        lambda: wt.plan_epoch(shards, batch_size=4, seed=seed),
        lambda: wt.mix({"a": shards}, batch_size=4, seed=seed),
        lambda: wt.stream(shards, seed=seed),
        lambda: wt.to_example({"label": wt.label()}, seed=seed),
    ):
        with pytest.raises(wt.UsageError, match="seed=.*: must be an integer"):
            call()
    assert not (tmp_path / "out").exists()


WEIGHTS = [
    {"a": float("nan"), "b": 1},
    {"a": float("inf"), "b": 1},
    {"a": "1", "b": 1},
    {"a": None, "b": 1},
    {"a": -1, "b": 1},
    [1, 2],
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_invalid_weights_are_refused(shards: Path, weights: Any) -> None:
    with pytest.raises(
        wt.UsageError,
        match=r"weights=.*: must have a finite number above 0 for each of the sources a, b",
    ):
        wt.mix({"a": shards, "b": shards}, weights=weights, batch_size=4)


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.uint8, Fraction])
def test_weights_of_any_number_type_give_the_same_mixture(shards: Path, kind: Any) -> None:
    plain = wt.mix({"a": shards, "b": shards}, weights={"a": 3, "b": 1}, batch_size=4)
    other = wt.mix({"a": shards, "b": shards}, weights={"a": kind(3), "b": kind(1)}, batch_size=4)
    assert keys(other) == keys(plain)
    assert json.loads(json.dumps(other.state_dict())) == plain.state_dict()


# --- copies ---

COPIES: dict[str, Callable[[wt.Loader], wt.Loader]] = {
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.fixture(params=["one set", "mixture"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    sets = {
        name: write_shards(tmp_path / name, counts)
        for name, counts in (("a", [7, 13, 1]), ("b", [30]))
    }

    def made(**options: Any) -> wt.Loader:
        arguments: dict[str, Any] = {
            "fields": {"label": wt.label()},
            "batch_size": 4,
            "seed": 5,
            "shuffle_buffer": 9,
            **options,
        }
        return (
            wt.Loader(sets["a"], **arguments)
            if request.param == "one set"
            else wt.mix(sets, weights={"a": 2, "b": 1}, **arguments)
        )

    return made


@pytest.mark.parametrize(("how", "num_workers"), [("pickle", 1), ("deepcopy", 0), ("copy", 0)])
def test_a_copy_of_a_loader_starts_at_the_position_of_the_loader(
    make: Make, how: str, num_workers: int
) -> None:
    uninterrupted = keys(make())
    loader = make(num_workers=num_workers)
    untouched = COPIES[how](loader)
    delivered = list[list[str]]()
    for batch in loader:
        delivered.append(batch["__key__"])
        if len(delivered) == 2:
            taken = COPIES[how](loader)
    loader.close()
    assert delivered == keys(untouched) == uninterrupted
    assert keys(taken) == uninterrupted[2:]
    for copied in (untouched, taken):
        copied.close()


def test_a_copy_has_the_rank_and_the_options_of_its_loader(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = wt.Loader(
        shards, batch_size=4, rank=1, world_size=2, tail="pad", on_error="replace", max_errors=0.5
    )
    sent = pickle.dumps(loader)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert keys(pickle.loads(sent)) == keys(loader)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("begun", [False, True])
def test_copying_a_pass_raises_and_suggests_copying_the_loader(
    shards: Path, how: Callable[[Any], Any], begun: bool
) -> None:
    loader = wt.Loader(shards, batch_size=4)
    batches = iter(loader)
    if begun:
        next(batches)
    with pytest.raises(
        wt.UsageError,
        match=r"cannot be pickled or copied.*Pickle the loader, or save loader\.state_dict\(\)",
    ):
        how(batches)
    assert next(batches)
    loader.close()
