"""Random runs of training, compared with a plain PyTorch loop and with each other.

Every case is a function of its seed, which pytest prints as the name of the test:

    pytest tests/oracle/test_training.py -k 17
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import wdstrain as wt
from tests.oracle.training_model import (
    HEADS,
    LAYERS,
    NAMES,
    NETS,
    SIDE,
    TOLERANT,
    PlainRun,
    Sample,
    draw_samples,
    input_options,
    own_loss,
    own_optimizer,
    write,
)
from tests.support.drawn_cases import check_block

DEFAULT = 20  # cases of the default suite
BLOCK, BLOCKS = 150, 2  # cases of the slow part: BLOCKS tests of BLOCK cases each

# Values that are drawn for each case; a value that is listed twice is drawn more often.
CHOICES: dict[str, tuple[Any, ...]] = {
    "label": ("kind", *HEADS),
    "input": ("image", "image", "image field", "vector", "both", "transform", "random transform"),
    "dtype": ("float32", "float64", "uint8"),
    "net": ("batch_norm", "layer_norm", "dropout", "dense"),
    "model": ("function", "module", "name"),
    "val": ("val", "val", "none"),
    "errors": (
        {},
        {},
        TOLERANT,
        {"on_error": "replace", "max_errors": 0.03},
    ),
    "bad": (0, 0, 1, 3),
    "balance": (None, None, "kind"),
    "shuffle_buffer": (None, 1, 10),
    "lanes": (None, 2),
    "seed": (0, 7),
    "num_workers": (0, 0, 0, 0, 0, 0, 0, 0, 0, 1),
    "limit_train_batches": (None, None, 3),
    "limit_val_batches": (None, None, 3),
    "epochs": (2, 3),
    "batch_size": (4, 6, 7),
    "accumulate": (1, 1, 2, 3),
    "optimizer": ("adamw", "adamw", "sgd", "lion", "own function", "own name"),
    "momentum": (0.9, 0.9, 0.0, 0.5),
    "lr": (0.01, 0.05),
    "min_lr": (0.0, 0.0, 0.004),
    "schedule": ("onecycle", "cosine", "step", "plateau", "constant"),
    "warmup": (0.0, 0.0, 0.5, 1.0),
    "step_epochs": (None, 2),
    "plateau_epochs": (3, 1),
    "weight_decay": (0.0, 0.05, 0.3),
    "backbone_lr": (1.0, 1.0, 0.1),
    "layer_decay": (1.0, 1.0, 0.5),
    "clip_norm": (0.0, 0.0, 0.3),
    "clip_value": (0.0, 0.0, 0.02),
    "ema": (0.0, 0.0, 0.5, 0.9),
    "amp": ("none", "none", "none", "bf16", "fp16"),
    "freeze": (None, None, None, "backbone", "blocks.0"),
    "unfreeze_epoch": (None, 0, 1),
    "grad_checkpointing": (False, False, True),
    "class_weights": ("none", "none", "balanced"),
    "label_smoothing": (0.0, 0.0, 0.1),
    "criterion": (None, None, None, own_loss),
    "augment": (None, None, "flip", "rrc+flip"),
    "color_jitter": ((), (), 0.4),
    "random_erasing": (0.0, 0.0, 0.5),
    "mixup": (0.0, 0.0, 0.0, 0.4),
    "cutmix": (0.0, 0.0, 0.0, 1.0),
    "mixup_prob": (1.0, 1.0, 0.6),
    "mixup_off_epoch": (None, None, 1),
    "monitor": (None, "loss", "accuracy", "exact", "mae", "pixel_accuracy", "size/mse"),
    "patience": (0, 0, 1),
    "checkpoint_every": (0, 1, 2),
    "slower": (False, False, True),  # a callback lowers the rate after the first epoch
    "kill": ("signal", "signal in validation", "stop", "exception"),
    "table": ("csv", "parquet"),
    "export": ("pt", "pt2"),
}
PAIRS = [(name, value) for name, values in CHOICES.items() for value in values]
STEP = 37  # cases with successive seeds are far apart in PAIRS

Drawn = dict[str, Any]
Pairs = list[tuple[str, Any]]


@pytest.mark.parametrize("seed", range(DEFAULT))
def test_a_random_run_equals_a_plain_loop_and_itself_after_a_stop(
    seed: int, tmp_path: Path
) -> None:
    check_case(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_more_random_runs_equal_a_plain_loop_and_use_every_option(
    block: int, tmp_path: Path
) -> None:
    used: Pairs = []
    check_block(lambda seed, folder: used.extend(check_case(seed, folder)), block, BLOCK, tmp_path)
    assert not [pair for pair in PAIRS if pair not in used]


def draw(rng: random.Random, seed: int) -> Drawn:
    """Return random options. That of one name depends on the seed, so that each value is used."""
    name, value = PAIRS[seed * STEP % len(PAIRS)]
    while True:
        drawn = {name: rng.choice(values) for name, values in CHOICES.items()} | {name: value}
        if is_valid(drawn) and is_not_a_known_fault(drawn):
            return drawn


def is_valid(drawn: Drawn) -> bool:
    """Return whether a run takes these options together."""
    is_image, is_dense = "image" in drawn["input"], drawn["label"] == "mask.png"
    mixes = bool(drawn["mixup"] or drawn["cutmix"])
    kinds = [kind for _, kind in HEADS[drawn["label"]]]
    known = {
        "class": (None, "loss", "accuracy"),
        "binary": (None, "loss", "accuracy"),
        "multi": ("loss", "exact"),  # mAP has bins, which the model has not
        "number": (None, "loss", "mae"),
        "mask": (None, "loss", "pixel_accuracy"),
    }
    monitors = known[kinds[0]] if len(kinds) == 1 else (None, "loss", "size/mse")
    has_criterion = drawn["criterion"] is not None
    return all(
        (
            is_dense == (drawn["net"] == "dense"),
            is_image or not is_dense,
            is_image or not drawn["augment"] or drawn["input"] == "both",
            is_image or not (drawn["color_jitter"] or drawn["random_erasing"] or mixes),
            not mixes or kinds in (["class"], ["binary"]),
            mixes or (drawn["mixup_prob"] == 1.0 and drawn["mixup_off_epoch"] is None),
            drawn["val"] == "val"
            or (
                drawn["monitor"] is None
                and not drawn["patience"]
                and drawn["schedule"] != "plateau"
            ),
            drawn["val"] == "none" or drawn["monitor"] in monitors,
            not has_criterion or (kinds in (["class"], ["number"]) and not mixes),
            not has_criterion
            or (not drawn["label_smoothing"] and drawn["class_weights"] == "none"),
            drawn["schedule"] != "onecycle" or not drawn["warmup"],
            drawn["schedule"] == "step" or drawn["step_epochs"] is None,
            drawn["schedule"] == "plateau" or drawn["plateau_epochs"] == 3,
            drawn["optimizer"] == "sgd" or drawn["momentum"] == 0.9,
            not (drawn["clip_norm"] and drawn["clip_value"]),
            drawn["freeze"] is not None or drawn["unfreeze_epoch"] is None,
            not is_dense or drawn["freeze"] != "blocks.0",
            drawn["lanes"] is None or drawn["batch_size"] % drawn["lanes"] == 0,
        )
    )


def is_not_a_known_fault(drawn: Drawn) -> bool:
    """Return whether the run is not one of a fault that a test of `tests/training` has."""
    return all(
        (
            # training/balance_and_class_weights_twice
            drawn["balance"] is None or drawn["class_weights"] == "none",
            # oracle/rate_of_a_callback: lost if the run is killed before the next checkpoint
            not drawn["slower"] or drawn["kill"] != "exception",
        )
    )


# --- a case ---------------------------------------------------------------------------------------


class Watch(wt.Callback):
    """Callback, and display of progress, that counts updates, and stops a run in some way.

    slower: whether it lowers the learning rate after the first epoch. kill, at: how it stops the
    run, and after which update.
    """

    def __init__(self, *, slower: bool, kill: str = "", at: int = 0) -> None:
        self.slower, self.kill, self.at, self.updates = slower, kill, at, 0

    def on_step_end(self, trainer: Any) -> None:
        self.updates += 1
        if self.updates != self.at:
            return
        if self.kill == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif self.kill == "stop":
            trainer.stop("for now")
        elif self.kill == "exception":
            raise Killed

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        trainer.lr_scale = 0.5 if self.slower else 1.0

    def step(self, title: str, done: int, total: int, text: str = "", unit: str = "") -> None:
        if self.kill == "signal in validation" and title == "validating":
            self.kill = ""
            os.kill(os.getpid(), signal.SIGUSR1)

    def line(self, text: str) -> None:
        pass


class Killed(Exception):
    """The end of a run without a last checkpoint."""


@dataclass
class Case:
    """A run: its options as they were drawn, its samples, its folder, and its result."""

    rng: random.Random
    drawn: Drawn
    plain: PlainRun
    folder: Path
    result: Any = None
    updates: int = 0

    @property
    def model(self) -> Any:
        net = NETS[self.drawn["net"]]
        if self.drawn["model"] == "function":
            return net
        return (
            self.plain.net()
            if self.drawn["model"] == "module"
            else f"{net.__module__}:{net.__name__}"
        )

    def train(self, name: str, watch: Watch, **more: Any) -> Any:
        """Run `wt.train` in a folder of this name."""
        drawn = self.drawn
        own = ("input", "dtype", "net", "val", "errors", "bad", "slower", "kill", "table", "export")
        options = {name: value for name, value in drawn.items() if name not in own}
        options |= drawn["errors"]
        if drawn["input"] == "image":
            options["image_size"] = SIDE
        else:
            options |= {"augment": None, **input_options(drawn, training=True)}
        if drawn["val"] != "none":
            options["val"] = self.folder / "val"
            if drawn["input"] == "random transform":
                options["val_transform"] = input_options(drawn, training=False)["transform"]
        options |= {"model": self.model, "device": "cpu", "deterministic": True}
        if drawn["label"] == "mask.png":
            options["classes"] = LAYERS
        if drawn["optimizer"].startswith("own"):
            module = own_optimizer.__module__
            is_name = drawn["optimizer"] == "own name"
            options["optimizer"] = f"{module}:own_optimizer" if is_name else own_optimizer
        options |= {"callbacks": [watch], "progress": watch, **more}
        return wt.train(self.folder / "train", self.folder / name, **options)

    def checkpoint(self, name: str = "last", run: str = "run") -> Path:
        return self.folder / run / "checkpoints" / f"{name}.pt"

    def state(self, name: str = "last", run: str = "run") -> dict[str, Any]:
        return torch.load(self.checkpoint(name, run), weights_only=True)

    def net(self) -> nn.Module:
        """Return the model of the last checkpoint."""
        model = self.plain.net()
        model.load_state_dict(self.state()["model"])
        return model.eval()

    def evaluate(self, name: str = "last") -> dict[str, float]:
        options = {"model": self.model, "device": "cpu", "progress": Watch(slower=False)}
        options |= {**TOLERANT, "criterion": self.drawn["criterion"]}
        if "transform" in self.drawn["input"]:
            options |= input_options(self.drawn, training=False)
        return wt.evaluate(self.checkpoint(name), self.folder / "val", **options)[1]


def check_case(seed: int, folder: Path) -> Pairs:
    """Train one random model and check all that is promised; return the options that ran."""
    rng = random.Random(seed)
    case = make_case(rng, draw(rng, seed), folder)
    watch, expected = Watch(slower=case.drawn["slower"]), ""
    try:
        case.plain.run()
    except wt.SampleError as error:
        expected = str(error)
    if expected:
        with pytest.raises(wt.SampleError) as raised:
            case.train("run", watch)
        assert str(raised.value) == expected
        return [("errors", case.drawn["errors"]), ("bad", case.drawn["bad"])]
    case.result, case.updates = case.train("run", watch), watch.updates
    for check in CHECKS:
        check(case)
    return list(case.drawn.items())


def make_case(rng: random.Random, drawn: Drawn, folder: Path) -> Case:
    """Return a case whose shards are written."""
    train = draw_samples(rng, rng.randrange(30, 60), drawn["bad"], drawn["dtype"])
    val = draw_samples(rng, rng.randrange(15, 30), min(1, drawn["bad"]), drawn["dtype"])
    write(train, folder / "train")
    write(val, folder / "val")
    return Case(rng, drawn, PlainRun(drawn, train, val, folder), folder)


# --- checks ---------------------------------------------------------------------------------------


def check_plain_loop(case: Case) -> None:
    """Check that the plain loop ends in the same weights, and logs the same figures."""
    plain = case.plain
    if case.drawn["net"] == "dropout":
        return
    compare_weights(case.state()["model"], plain.weights[-1])
    compare_weights(case.state().get("raw", {}), plain.raw if case.drawn["ema"] else {})
    assert len(case.result.epochs) == len(plain.epochs)
    for line, expected in zip(case.result.epochs, plain.epochs, strict=True):
        compare_metrics(line, {n: v for n, v in expected.items() if n[:3] not in ("val", "lr")})
        for name in {"val", "val_raw"} & expected.keys():
            compare_metrics(line[name], expected[name])
        # training/lr_log_shows_backbone: the log has the rate of the first layer
        if case.drawn["backbone_lr"] == case.drawn["layer_decay"] == 1:
            compare_metrics(line, {"lr": expected["lr"]})


def compare_weights(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6, msg=name)


def compare_metrics(actual: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def check_best(case: Case) -> None:
    """Check that best.pt is of the epoch that the monitored metric says."""
    lines = case.result.epochs
    best = replace(case.plain, epochs=lines).best()
    assert case.state("best")["state"]["epoch"] == best + 1
    if case.drawn["net"] != "dropout":
        compare_weights(case.state("best")["model"], case.plain.weights[best])
    if case.drawn["val"] != "none":
        assert case.result.best == lines[best]["val"]


def check_evaluate(case: Case) -> None:
    """Check that `evaluate` repeats the validation, and scores as the model of this test does."""
    metrics = case.evaluate()
    compare_metrics(metrics, case.plain.score(case.net()))
    if case.drawn["val"] != "none" and case.drawn["limit_val_batches"] is None:
        last = case.result.val
        assert metrics == {name: value for name, value in last.items() if name in metrics}
        assert case.evaluate("best") == {n: v for n, v in case.result.best.items() if n in metrics}


def check_predict(case: Case) -> None:
    """Check that a table of predictions has the metrics of `evaluate`."""
    path = case.folder / f"table.{case.drawn['table']}"
    options = {"model": case.model, "device": "cpu", "progress": Watch(slower=False)}
    if "transform" in case.drawn["input"]:
        options |= input_options(case.drawn, training=False)
    kinds = {kind for _, kind in case.plain.heads}
    options["probabilities"] = bool(kinds & {"class", "binary", "multi"})
    result = wt.predict(case.checkpoint(), case.folder / "val", path, **options)
    table = read_table(path)
    assert [row["key"] for row in table] == [sample.key for sample in case.plain.val]
    good = [row for row in table if not row["error"]]
    assert (result.rows, result.bad) == (len(table), len(table) - len(good))
    assert result.bad == min(1, case.drawn["bad"])
    predicted = [
        np.array([predicted_value(row, label, kind, case.folder) for row in good])
        for label, kind in case.plain.heads
    ]
    expected = case.plain.metrics(predicted, [row["key"] for row in good])
    compare_metrics(case.evaluate(), expected)
    for label, kind in case.plain.heads:
        if kind == "mask":
            continue
        for row, sample in zip(table, case.plain.val, strict=True):
            if not row["error"]:
                compare_true(row[f"{label} true"], sample, label)


def read_table(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    return list(csv.DictReader(io.StringIO(path.read_text())))


def predicted_value(row: dict[str, Any], label: str, kind: str, folder: Path) -> Any:
    """Return a prediction of the table as `predictions` has it."""
    if kind == "number":
        return float(row[label])
    if kind == "mask":
        return np.array(Image.open(folder / row[label]))
    names = NAMES[label]
    shares = np.array([float(row[f"{label}={name}"]) for name in names])
    if kind == "multi":
        assert row[label] == "|".join(n for n, s in zip(names, shares, strict=True) if s > 0.5)
        return shares > 0.5
    assert shares.sum() == pytest.approx(1)
    assert row[label] == names[shares.argmax()]
    return shares.argmax()


def compare_true(value: Any, sample: Sample, label: str) -> None:
    """Assert that the table's label of a sample is the model's."""
    text = sample.fields["json"][label]
    assert value == ("|".join(text) if isinstance(text, list) else text) or float(value) == text


def check_export(case: Case) -> None:
    """Check that an exported model has the weights, or the outputs, of the checkpoint."""
    path, plain = case.folder / f"model.{case.drawn['export']}", case.plain
    wt.export(case.checkpoint(), path, model=case.model)
    if path.suffix == ".pt":
        compare_weights(torch.load(path), case.state()["model"])
        return
    program, model = torch.export.load(path).module(), case.net()
    with torch.no_grad():
        for batch in plain.val_batches():
            inputs = [batch[name].float() for name in ("image", "vector") if name in batch]
            outputs = program(*inputs)
            expected = plain.call(model, batch, amp=False)
            for (_, kind), own in zip(plain.heads, expected, strict=True):
                part, outputs = outputs[:, : own.shape[1]], outputs[:, own.shape[1] :]
                if kind == "number":
                    own = own * plain.scale[1] + plain.scale[0]
                torch.testing.assert_close(part, own, rtol=1e-5, atol=1e-5)


def check_resume(case: Case) -> None:
    """Check that a run that was stopped and resumed has the bits of the first."""
    # training/resume_forgets_bad_samples: an error that the first run avoids, or the reverse
    if case.drawn["errors"].get("max_errors") == 0.03:
        return
    kill, at = case.drawn["kill"], case.rng.randrange(case.updates) + 1
    with suppress(Killed, KeyboardInterrupt):
        case.train("again", Watch(slower=case.drawn["slower"], kill=kill, at=at))
    case.train("again", Watch(slower=case.drawn["slower"]), resume=True)
    assert_equal(timeless(case.state(run="again")), timeless(case.state()))
    lines = [
        [timeless(json.loads(line)) for line in text.splitlines()]
        for text in ((case.folder / run / "metrics.jsonl").read_text() for run in ("again", "run"))
    ]
    assert lines[0] == lines[1]


def timeless(value: Any) -> Any:
    """Return a value without seconds, and without what follows from them."""
    if isinstance(value, dict):
        timed = ("seconds", "samples_per_second", "stall", "verdict")
        return {n: timeless(v) for n, v in value.items() if not str(n).endswith(timed)}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def assert_equal(actual: Any, expected: Any, place: str = "") -> None:
    """Assert that checkpoints are equal, bit by bit."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), place
        for name, value in expected.items():
            assert_equal(actual[name], value, f"{place}/{name}")
    elif isinstance(expected, Tensor):
        assert torch.equal(actual, expected), place
    else:
        assert actual == expected, place


CHECKS: tuple[Callable[[Case], None], ...] = (
    check_plain_loop,
    check_best,
    check_evaluate,
    check_predict,
    check_export,
    check_resume,
)


PLAIN = {name: values[0] for name, values in CHOICES.items()}


@pytest.mark.parametrize(
    ("drawn", "planted"),
    [
        ({}, {"weight_decay": 0.3}),
        ({"ema": 0.9}, {"ema": 0.5}),
        ({}, {"label_smoothing": 0.1}),
        ({"class_weights": "balanced"}, {"class_weights": "none"}),
        ({"schedule": "step"}, {"schedule": "constant"}),
        ({"accumulate": 3}, {"clip_norm": 0.3}),
        ({"optimizer": "lion"}, {"min_lr": 0.004}),
        ({"freeze": "backbone"}, {"freeze": "blocks.0"}),
    ],
)
def test_a_plain_loop_with_another_option_differs(
    drawn: Drawn, planted: Drawn, tmp_path: Path
) -> None:
    """This holds for one option, so the loop shows a run that does not follow it."""
    case = make_case(random.Random(0), {**PLAIN, **drawn}, tmp_path)
    case.result = case.train("run", Watch(slower=False))
    check_plain_loop(replace(case, plain=case.plain.run()))
    other = replace(case.plain, drawn={**case.drawn, **planted}, epochs=[], weights=[])
    with pytest.raises(AssertionError):
        check_plain_loop(replace(case, plain=other.run()))
