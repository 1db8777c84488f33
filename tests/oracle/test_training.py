"""Random runs of training, compared with a plain PyTorch loop and with each other."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import wdstrain as wt
from tests.oracle.training_model import (
    HEADS,
    LABELS,
    LOSSES,
    NAMES,
    NETS,
    SIDE,
    TOLERANT,
    Drawn,
    PlainRun,
    Tensors,
    draw_samples,
    image_options,
    input_options,
    label_field,
    own_optimizer,
    write,
)
from tests.support.drawn_cases import check_block

DEFAULT = 12  # cases of the default suite
# Cases of the slow part: BLOCKS tests of BLOCK cases each, so that each has all of PAIRS.
BLOCK, BLOCKS = 150, 2

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop by default

# Values that are drawn for each case; a value that is listed twice is drawn more often.
CHOICES: dict[str, tuple[Any, ...]] = {
    "label": ("kind", *HEADS),
    "declared": (True, True, False),  # whether the index names the labels
    "label_field": (False, False, True),  # whether an entry of fields= names the label
    "input": ("image", "image", "image field", "vector", "both", "own field", "random field"),
    "dtype": ("float32", "float64", "uint8", "float16", "uint16", "int32", "bool"),
    "net": ("batch_norm", "layer_norm", "dropout", "dense"),
    "model": ("function", "module", "name"),
    "weights": (None, None, None, "start.pt"),
    "val": ("val", "val", "none"),
    "errors": ({}, TOLERANT, {"on_error": "replace", "max_errors": 0.03}),
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
    "optimizer": ("adamw", "adamw", "sgd", "sgd", "own function", "own name"),
    "momentum": (0.9, 0.9, 0.0, 0.5),
    "lr": (0.01, 0.05),
    "min_lr": (0.0, 0.0, 0.004),
    "schedule": ("onecycle", "cosine", "step", "plateau", "constant"),
    "warmup": (0.0, 0.0, 0.5, 1.0),
    "step_epochs": (None, 2),
    "plateau_epochs": (3, 1),
    "weight_decay": (0.0, 0.05, 0.3),
    "backbone_lr": (1.0, 1.0, 0.1),
    "clip_norm": (0.0, 0.0, 0.3),
    "clip_value": (0.0, 0.0, 0.02),
    "ema": (0.0, 0.0, 0.5, 0.9),
    "amp": ("none", "none", "none", "bf16", "fp16"),
    "freeze": (None, None, None, "backbone", "blocks.0"),
    "unfreeze_epoch": (None, 0, 1),
    "class_weights": ("none", "none", "balanced"),
    "label_smoothing": (0.0, 0.0, 0.1),
    "grad_checkpointing": (False, False, True),
    "criterion": (None, None, None, functional.smooth_l1_loss, "torch"),
    "augment": (None, None, "flip", "rrc+flip", "trivialaugment"),
    "scale": (SCALE, SCALE, (0.3, 0.6)),
    "ratio": (RATIO, RATIO, (1.0, 1.0)),
    "crop_pct": (1.0, 1.0, 0.5),
    "color_jitter": (0.0, 0.0, 0.4),
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
    "export": ("pt", "pt2"),
}
PAIRS = [
    (name, value)
    for name, values in CHOICES.items()
    for place, value in enumerate(values)
    if value not in values[:place]
]
STEP = 37  # cases with successive seeds are far apart in PAIRS

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
    may_fail = name in ("bad", "errors", "shuffle_buffer", "lanes", "epochs")
    while True:
        options = {name: rng.choice(values) for name, values in CHOICES.items()} | {name: value}
        drawn = Drawn(**options)
        is_complete = may_fail or not drawn.bad or drawn.errors == TOLERANT
        if is_complete and is_valid(drawn):
            return drawn


def is_valid(drawn: Drawn) -> bool:
    """Return whether a run takes these options together."""
    kinds = [kind for _, kind, _ in HEADS[drawn.label]]
    learns_kind = any(label == "kind" for label, *_ in HEADS[drawn.label])
    monitors: dict[str, tuple[str | None, ...]] = {
        "multi": ("loss", "exact"),  # mAP has bins, which the model has not
        "number": (None, "loss", "mae"),
        "mask": (None, "loss", "pixel_accuracy"),
        "several": (None, "loss", "size/mse"),
    }
    known = monitors.get(kinds[0] if len(kinds) == 1 else "several", (None, "loss", "accuracy"))
    is_image, is_alone = "image" in drawn.input, drawn.input != "both"
    changes_colors, mixes = drawn.color_jitter or drawn.random_erasing, drawn.mixup or drawn.cutmix
    is_simple = drawn.label in ("kind", "flag", "tags", "size")
    has_val = drawn.monitor or drawn.patience or drawn.schedule == "plateau"
    return all(
        (
            ("mask" in kinds) == (drawn.net == "dense"),
            is_image or "mask" not in kinds,
            is_image or drawn.input == "both" or not drawn.augment,
            (is_image and is_alone) or not (changes_colors or mixes),
            not mixes or kinds in (["class"], ["binary"]),
            "rrc" in (drawn.augment or "") or (drawn.scale, drawn.ratio) == (SCALE, RATIO),
            "mask" not in kinds or drawn.augment != "trivialaugment",
            is_image or drawn.input == "both" or drawn.crop_pct == 1,
            "mask" not in kinds or drawn.crop_pct == 1,  # metrics of the model are of whole masks
            not drawn.grad_checkpointing or drawn.net in ("layer_norm", "dropout"),
            mixes or (drawn.mixup_prob == 1 and drawn.mixup_off_epoch is None),
            not callable(drawn.criterion) or kinds == ["number"],
            drawn.criterion != "torch" or not (mixes or "mask" in kinds),
            not drawn.criterion or (not drawn.label_smoothing and drawn.class_weights == "none"),
            drawn.monitor in known if drawn.val == "val" else not has_val,
            drawn.schedule != "onecycle" or not drawn.warmup,
            drawn.schedule == "step" or drawn.step_epochs is None,
            drawn.schedule == "plateau" or drawn.plateau_epochs == 3,
            drawn.optimizer == "sgd" or drawn.momentum == 0.9,
            not (drawn.clip_norm and drawn.clip_value),
            drawn.freeze or drawn.unfreeze_epoch is None,
            drawn.net != "dense" or drawn.freeze != "blocks.0",
            drawn.batch_size % (drawn.lanes or 1) == 0,
            drawn.declared or (is_simple and drawn.balance is None),
            not (drawn.balance and drawn.class_weights == "balanced" and learns_kind),
            not drawn.label_field or (is_simple and drawn.input in ("image field", "vector")),
        )
    )


# --- a case ---------------------------------------------------------------------------------------


class Killed(Exception):
    """The end of a run without a last checkpoint."""


class Watch(wt.Callback):
    """Callback, and display of progress, that counts updates, and ends a run in some way.

    slower: whether it lowers the learning rate after the first epoch. kill, at: how it ends the
    run, and after which update.
    """

    def __init__(self, *, slower: bool = False, kill: str = "", at: int = 0) -> None:
        self.slower, self.kill, self.at, self.updates = slower, kill, at, 0

    def on_step_end(self, trainer: Any) -> None:
        self.updates += 1
        if self.updates == self.at and self.kill == "signal":
            os.kill(os.getpid(), signal.SIGUSR1)
        elif self.updates == self.at and self.kill == "stop":
            trainer.stop("for now")
        elif self.updates == self.at and self.kill == "exception":
            raise Killed

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        trainer.lr_scale = 0.5 if self.slower else 1.0

    def step(self, title: str, *values: Any) -> None:
        if self.kill == "signal in validation" and title == "validating":
            self.kill = ""
            os.kill(os.getpid(), signal.SIGUSR1)

    def line(self, text: str) -> None: ...


NO_OPTIONS = {"declared", "label_field", "input", "dtype", "net", "val", "errors", "bad"}
NO_OPTIONS |= {"slower", "kill", "export"}


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
        net = NETS[self.drawn.net]
        given = {"module": self.plain.net(), "name": f"{net.__module__}:{net.__name__}"}
        return given.get(self.drawn.model, net)

    @property
    def criterion(self) -> Any:
        """The loss that is given to the run; of several labels a loss for each."""
        if self.drawn.criterion != "torch":
            return self.drawn.criterion
        losses = {label: LOSSES[kind] for label, kind, _ in self.plain.heads}
        return losses if len(losses) > 1 else next(iter(losses.values()))

    def train(self, name: str, watch: Watch, **more: Any) -> Any:
        """Run `wt.train` in a folder of this name."""
        drawn = self.drawn
        options = {name: value for name, value in vars(drawn).items() if name not in NO_OPTIONS}
        options |= drawn.errors
        if not drawn.declared:
            options["label"] = f"json.{drawn.label}"
        if drawn.input == "image":
            options["image_size"] = SIDE
        else:
            for name_ in image_options(drawn, training=True):
                del options[name_]
            options |= input_options(drawn, training=True)
        if drawn.label_field:
            options["fields"]["label"] = label_field(drawn.label)
        if drawn.weights:
            options["weights"] = self.folder / drawn.weights
        if drawn.val == "val":
            options["val"] = self.folder / "val"
            if drawn.input == "random field":
                options["val_fields"] = input_options(drawn, training=False)["fields"]
        if drawn.label == "mask.png":
            options["classes"] = "sky,sea,sun"
        if drawn.optimizer.startswith("own"):
            name_of = f"{own_optimizer.__module__}:own_optimizer"
            options["optimizer"] = own_optimizer if drawn.optimizer == "own function" else name_of
            del options["lr"], options["weight_decay"]
        options |= {"model": self.model, "device": "cpu", "deterministic": True, **more}
        options["criterion"] = self.criterion
        out = self.folder / name
        return wt.train(self.folder / "train", out, callbacks=[watch], progress=watch, **options)

    def checkpoint(self, name: str = "last", run: str = "run") -> Path:
        return self.folder / run / "checkpoints" / f"{name}.pt"

    def state(self, name: str = "last", run: str = "run") -> dict[str, Any]:
        return torch.load(self.checkpoint(name, run), weights_only=True)

    def net(self) -> nn.Module:
        """Return the model of the last checkpoint."""
        model = self.plain.net()
        model.load_state_dict(self.state()["model"])
        return model.eval()

    def trained(self) -> dict[str, Any]:
        """Return the options of a trained model for `wt.evaluate` and `wt.predict`."""
        is_own = self.drawn.input in ("own field", "random field")
        inputs = input_options(self.drawn, training=False) if is_own else {}
        return {"model": self.model, "device": "cpu", "progress": Watch(), **inputs}

    def evaluate(self, name: str = "last") -> dict[str, Any]:
        options = {**TOLERANT, "criterion": self.criterion, **self.trained()}
        return wt.evaluate(self.checkpoint(name), self.folder / "val", **options)[1]


def check_case(seed: int, folder: Path) -> Pairs:
    """Train one random model and check all that is promised; return the options that ran."""
    rng = random.Random(seed)
    case = make_case(rng, draw(rng, seed), folder)
    watch, expected, errors = Watch(slower=case.drawn.slower), "", case.drawn.errors
    try:
        case.plain.run()
    except wt.SampleError as error:
        expected = str(error)
    if expected:
        with pytest.raises(wt.SampleError) as raised:
            case.train("run", watch)
        assert str(raised.value) == expected
        check_resume_with_bad_samples(case)
        return [("errors", errors), ("bad", case.drawn.bad)]
    case.result, case.updates = case.train("run", watch), watch.updates
    is_checkpointed = getattr(case.result.model, "is_checkpointed", False)
    assert case.drawn.ema or is_checkpointed == case.drawn.grad_checkpointing
    for check in (check_plain_loop, check_best, check_evaluate, check_predict, check_export):
        check(case)
    check_resume(case)
    return list(vars(case.drawn).items())


def make_case(rng: random.Random, drawn: Drawn, folder: Path) -> Case:
    """Return a case whose shards are written."""
    train = draw_samples(rng, rng.randrange(30, 60), drawn.bad, drawn.dtype)
    val = draw_samples(rng, rng.randrange(15, 30), min(1, drawn.bad), drawn.dtype)
    labels = LABELS if drawn.declared else []
    write(train, folder / "train", labels)
    write(val, folder / "val", labels)
    plain = PlainRun(drawn, train, val, folder)
    torch.save({n: v + 1 for n, v in plain.net().state_dict().items()}, folder / "start.pt")
    return Case(rng, drawn, plain, folder)


# --- checks ---------------------------------------------------------------------------------------


def check_plain_loop(case: Case) -> None:
    """Check that the plain loop ends in the same weights, and logs the same figures."""
    if case.drawn.net == "dropout":
        return
    compare_weights(case, case.state()["model"], case.plain.weights[-1])
    compare_weights(case, case.state().get("raw", {}), case.plain.raw)
    assert len(case.result.epochs) == len(case.plain.epochs)
    for line, expected in zip(case.result.epochs, case.plain.epochs, strict=True):
        compare_metrics(line, expected)


def compare_weights(case: Case, actual: Tensors, expected: Tensors) -> None:
    """Assert that weights are equal, but for sums in another order, which 16 bits enlarge.

    Nearly all have the same bits; of the others 1e-7 is usual.
    """
    assert actual.keys() == expected.keys()
    tolerance = {"rtol": 1e-6, "atol": 1e-6 if case.drawn.amp == "none" else 1e-4}
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **tolerance, msg=name)


def compare_metrics(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if isinstance(value, dict):
            compare_metrics(actual[name], value)
        else:
            assert actual[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def check_best(case: Case) -> None:
    """Check that best.pt is of the epoch that the monitored metric says."""
    lines = case.result.epochs
    best = replace(case.plain, epochs=lines).best()
    assert case.state("best")["state"]["epoch"] == best + 1
    if case.drawn.net != "dropout":
        compare_weights(case, case.state("best")["model"], case.plain.weights[best])
    assert case.result.best == lines[best].get("val")


def check_evaluate(case: Case) -> None:
    """Check that `evaluate` repeats the validation, and scores as the plain loop does."""
    metrics = case.evaluate()
    classes = metrics.pop("classes", {})
    compare_metrics(metrics, case.plain.score(case.net()))
    if case.drawn.val == "val" and case.drawn.limit_val_batches is None:
        assert metrics == {name: case.result.val[name] for name in metrics}
        assert classes == case.result.epochs[-1].get("classes", {})
        best = case.evaluate("best")
        best.pop("classes", None)
        assert best == {name: case.result.best[name] for name in metrics}


def check_predict(case: Case) -> None:
    """Check that a table of predictions has the metrics of `evaluate`."""
    path, plain = case.folder / "table.csv", case.plain
    shares = any(label in NAMES for label, *_ in plain.heads)
    options = {"probabilities": shares, **case.trained()}
    result = wt.predict(case.checkpoint(), case.folder / "val", path, **options)
    table = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [row["key"] for row in table] == [sample.key for sample in plain.val]
    good = [row for row in table if not row["error"]]
    assert result.bad == len(table) - len(good) == min(1, case.drawn.bad)
    predicted = [
        np.array([predicted_value(row, label, kind, case.folder) for row in good])
        for label, kind, _ in plain.heads
    ]
    metrics = case.evaluate()
    metrics.pop("classes", None)
    compare_metrics(metrics, plain.metrics(predicted, [row["key"] for row in good]))


def predicted_value(row: dict[str, str], label: str, kind: str, folder: Path) -> Any:
    """Return a prediction of the table as the plain loop has it."""
    if kind == "number":
        return float(row[label])
    if kind == "mask":
        return np.array(Image.open(folder / row[label]))
    names = np.array(NAMES[label])
    shares = np.array([float(row[f"{label}_{name}"]) for name in names])
    if kind == "multi":
        assert row[label] == "|".join(names[shares > 0.5])
        return shares > 0.5
    assert row[label] in names[shares == shares.max()]  # as written, two shares may be equal
    return names.tolist().index(row[label])


def check_export(case: Case) -> None:
    """Check that an exported model has the weights, or the outputs, of the checkpoint."""
    path, plain, model = case.folder / f"model.{case.drawn.export}", case.plain, case.net()
    wt.export(case.checkpoint(), path, model=case.model)
    if path.suffix == ".pt":
        assert_equal(torch.load(path), case.state()["model"])
        return
    program = torch.export.load(path).module()
    for batch in plain.val_batches():
        inputs = [batch[name].float() for name in ("image", "vector") if name in batch]
        with torch.no_grad():
            expected = plain.call(model, batch, amp=False)
            for i, (_, kind, _) in enumerate(plain.heads):
                if kind == "number":
                    expected[i] = expected[i] * plain.scale[1] + plain.scale[0]
            torch.testing.assert_close(
                program(*inputs).float(), torch.cat(expected, 1), rtol=1e-5, atol=1e-5
            )


OTHER: dict[str, Any] = {"keep": 1, "checkpoint_every": 3, "num_workers": 1}  # of a resumed run


def check_resume(case: Case) -> None:
    """Check that a run that was stopped and resumed has the bits of the first."""
    for _ in range(case.rng.choice((1, 2))):
        watch = Watch(slower=case.drawn.slower)
        watch.kill, watch.at = case.drawn.kill, case.rng.randrange(case.updates) + 1
        with suppress(Killed, KeyboardInterrupt):
            case.train("again", watch, resume=True)
    other = {**OTHER, "num_workers": case.rng.choice((0, 0, 0, 1))}
    case.train("again", Watch(slower=case.drawn.slower), resume=True, **other)
    assert_equal(timeless(case.state(run="again")), timeless(case.state()))
    texts = ((case.folder / run / "metrics.jsonl").read_text() for run in ("again", "run"))
    lines = [[timeless(json.loads(line)) for line in text.splitlines()] for text in texts]
    assert lines[0] == lines[1]


def check_resume_with_bad_samples(case: Case) -> None:
    """Check that a run that bad samples ended continues as if they had always been allowed."""
    case.drawn.errors = TOLERANT
    case.plain = replace(case.plain, epochs=[], weights=[]).run()
    case.result = case.train("run", Watch(slower=case.drawn.slower), resume=True)
    check_plain_loop(case)


def timeless(value: Any) -> Any:
    """Return a value without seconds, what follows from them, and options that may change."""
    if isinstance(value, dict):
        timed = ("seconds", "samples_per_second", "stall", "verdict", *OTHER)
        return {n: timeless(v) for n, v in value.items() if not str(n).endswith(timed)}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def assert_equal(actual: Any, expected: Any, place: str = "") -> None:
    """Assert that checkpoints are equal, bit by bit."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), place
        for name, value in expected.items():
            assert_equal(actual[name], value, f"{place}/{name}")
    else:
        is_tensor = isinstance(expected, Tensor)
        assert torch.equal(actual, expected) if is_tensor else actual == expected, place
