"""Epochs of training and validation: forward, loss, backward, step, as in every PyTorch script.

All that a run is at a moment is its weights, the optimiser's state and a position, the epoch and the step in it. Order and pictures are
functions of the position, so is the learning rate, and so are the random numbers of the model's own (dropout): torch is seeded
anew at every step. So a run that goes on from a checkpoint does what it would have done, bit for bit where the arithmetic is
deterministic. A checkpoint is only taken between two steps of the optimiser.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wdstrain.errors import StorageError, UsageError, WdstrainError
from wdstrain.loader.device import to_device
from wdstrain.loader.gpu_augment import Augmentation
from wdstrain.loader.loader import Loader
from wdstrain.loader.stats import EpochStats
from wdstrain.order.rng import key
from wdstrain.training import tally
from wdstrain.training.checkpoints import FORMAT
from wdstrain.training.configuration import Config
from wdstrain.training.interruption import Interruption, Stopped
from wdstrain.training.metrics import better, short
from wdstrain.training.models import train_mode
from wdstrain.training.recipe import Average, Schedule, arithmetic, make_optimiser, set_rate
from wdstrain.training.scoring import score
from wdstrain.training.stages import STAGES, Stages
from wdstrain.training.task import Task, normalised
from wdstrain.training.telling import Tell
from wdstrain.training.world import GO_ON, SAVE, STOP, World

_LISTED = 100  # classes whose accuracies stand in the line of an epoch
_SHOWN = 0.5  # seconds between looks at the loss, for which a GPU is waited for


class Keep(Protocol):
    """Who keeps what a run comes to."""

    def record(self, line: dict[str, Any]) -> None:
        """What the last second or so was: position, loss, rates."""
        ...

    def epoch(self, metrics: dict[str, Any], details: dict[str, Any]) -> None:
        """An epoch has ended."""
        ...

    def save(self, state: dict[str, Any], step: int, *, best: bool) -> None:
        """Write a checkpoint."""
        ...


@dataclass
class Progress:
    """Where a run is. step: of batches in the epoch; seconds: of the epoch so far, by stage."""

    epoch: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None
    since_best: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    verdict: str = ""


class Training:
    """A run from where it is to its end."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        loader: Loader,
        val_loader: Loader | None,
        config: Config,
        *,
        world: World,
        device: torch.device,
        weights: list[Tensor | None],
        picture: Mapping[str, Any],
        keep: Keep,
        tell: Tell,
    ) -> None:
        """weights: of the classes of each head. picture: what the model is given, as `picture_state` tells it."""
        self.model, self.task, self.loader, self.val_loader, self.config = (
            model,
            task,
            loader,
            val_loader,
            config,
        )
        self._world, self._device, self._keep, self._tell = world, device, keep, tell
        self._weights, self._picture = weights, dict(picture)
        self.optimiser = make_optimiser(model, config)
        self.average = Average(model, config.ema) if config.ema else None
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
        self.updates = math.ceil(
            len(loader) / config.accumulate
        )  # steps of the optimiser in an epoch
        self._rate = Schedule(config, self.updates)
        self._layout = torch.channels_last if config.channels_last else torch.contiguous_format
        spread = world.spread(model, device)
        self._net: Any = torch.compile(spread) if config.compile else spread
        self._augmentation = _mixing(task, config)
        self._names = tally.names(task)
        self.at = Progress()
        self._sums = self._no_sums()
        self._saved_at = self._begun = time.monotonic()
        self._wished = False  # a checkpoint, by the clock; all will write it a step later
        self._failed: StorageError | None = None
        self._data_error: WdstrainError | None = (
            None  # of the loader: what was learned until then is sound
        )

    @property
    def scored(self) -> nn.Module:
        """The weights that are validated: the average, if there is one."""
        return self.average.model if self.average is not None else self.model

    # --- the run -----------------------------------------------------------------------------------------------------

    def fit(self, interruption: Interruption) -> None:
        """Train until all epochs are done, or until somebody asks to stop: then a checkpoint is written and Stopped raised."""
        if self._is_over():
            self._tell.line(
                f"patience={self.config.patience} ended this run. Raise it, or set it to 0, to go on."
            )
        try:
            while self.at.epoch < self.config.epochs and not self._is_over():
                self._train(interruption)
                details = self._validate(interruption) if self.val_loader is not None else {}
                self._finish_epoch(details)
        except WdstrainError as error:
            if error is self._data_error:
                self._save_before_error()
            raise
        except Stopped:
            self.save()
            if self._failed is not None:  # no checkpoint, and no word of one
                raise self._failed from None
            raise
        if self._failed is not None:
            raise self._failed

    def _save_before_error(self) -> None:
        """Write a checkpoint of the last step after the data gave an error, so that the run can go on from there.

        Not with several processes: the others are within a step, and a checkpoint needs the sums of all.
        """
        if self._world.size == 1:
            self.save()
            if self._failed is None:
                self._tell.line(
                    f"A checkpoint of {self._title}, step {self.at.step}, was written; resume goes on from it."
                )

    def _is_over(self) -> bool:
        return 0 < self.config.patience <= self.at.since_best

    def _train(self, interruption: Interruption) -> None:
        """The rest of an epoch."""
        at, steps, config = self.at, len(self.loader), self.config
        if at.step == steps:  # all but the validation was done before
            return
        train_mode(self.model)
        given = self.loader.epoch(at.epoch, start=at.step, until=config.epochs)
        batches = to_device(given, self._device, self._augmentation)
        stages, shown, recorded, before = (
            Stages(self._device),
            time.monotonic(),
            time.monotonic(),
            self._sums.tolist(),
        )
        text, window, seen = "", dict.fromkeys(STAGES, 0.0), before[1]
        fresh = dict.fromkeys(
            STAGES, 0.0
        )  # seconds since the epoch was begun here, as the loader's report has them
        while at.step < steps:
            update = at.epoch * self.updates + at.step // config.accumulate
            group = min(config.accumulate, steps - at.step)
            set_rate(self.optimiser, config.lr * self._rate(update))
            torch.manual_seed(key("step", config.seed, at.epoch, at.step, self._world.rank))
            self.optimiser.zero_grad(set_to_none=True)
            whole = _Snapshot(self._sums, self.model) if group > 1 else None
            for turn in range(group):
                try:
                    batch = self._next(batches, interruption, is_first=turn == 0)
                except WdstrainError as error:
                    self._data_error = error
                    if whole is not None:
                        whole.restore(self._sums, self.model)
                    raise
                stages.lap("data")
                alone = (
                    nullcontext()
                    if turn == group - 1 or self._world.size == 1
                    else self._net.no_sync()
                )
                with alone:
                    self._learn(batch, group)
                del batch
                stages.lap("compute")
            self._update(update)
            stages.lap("optimiser")
            at.step += group
            now = time.monotonic()
            if now - shown >= _SHOWN or at.step == steps:
                shown, seconds = now, stages.window(self.loader.report()["copy_seconds"])
                at.seconds = {name: at.seconds[name] + seconds[name] for name in STAGES}
                window = {name: window[name] + seconds[name] for name in STAGES}
                fresh = {name: fresh[name] + seconds[name] for name in STAGES}
                sums = self._looked_at()
                text = self._text(
                    sums,
                    (sums["samples"] - seen) * self._world.size / max(1e-9, sum(seconds.values())),
                )
                seen = sums["samples"]
                if now - recorded >= 1.0 + (now - self._begun) / 300 or at.step == steps:
                    self._record(before, sums, window)
                    recorded, before, window = now, list(sums.values()), dict.fromkeys(STAGES, 0.0)
            self._tell.step(self._title, at.step, steps, text, "")
            if at.step < steps:
                self._obey(interruption)
        at.verdict = self._verdict(fresh)
        next(
            batches, None
        )  # the epoch's own end, where what was promised and what was given are compared

    def _next(
        self, batches: Iterator[dict[str, Any]], interruption: Interruption, *, is_first: bool
    ) -> dict[str, Any]:
        if (
            self._world.size > 1 or not is_first
        ):  # all must stop at the same step, and none within one of the optimiser's
            return next(batches)
        with interruption.waiting():
            return next(batches)

    def _learn(self, batch: Mapping[str, Any], group: int) -> None:
        """Forward and backward of one batch, whose gradient is one of `group`."""
        task, targets = self.task, self.task.targets(batch)
        pixels = normalised(batch["image"]).contiguous(memory_format=self._layout)
        with arithmetic(self.config, self._device):
            outputs = self._net(pixels)
        losses = torch.zeros(len(pixels), device=self._device)
        smoothing = self.config.label_smoothing
        for head, own, target, weights in zip(
            task.heads, task.split(outputs), targets, self._weights, strict=True
        ):
            losses = losses + head.losses(own, target, smoothing=smoothing, weights=weights)
        self.scaler.scale(losses.mean() / group).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            may_overflow = (
                self.scaler.is_enabled()
            )  # such a step is left out, and the scaler tries a smaller scale
            sums = tally.counted(
                task, outputs.detach(), targets, losses.detach(), may_overflow=may_overflow
            )
            self._sums += torch.stack(sums)

    def _update(self, update: int) -> None:
        if self.config.clip:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.average is not None:
            self.average.update(self.model, update)

    def _obey(self, interruption: Interruption) -> None:
        """Do between two steps what the clock, the count of steps or a signal asks for."""
        at, config = self.at, self.config
        every, minutes = config.checkpoint_every, config.checkpoint_minutes
        # a count that all processes have needs no exchange; it is met where the optimiser's step ends, so by accumulated steps
        due = bool(every) and at.step // every > (at.step - config.accumulate) // every
        late = (
            bool(minutes)
            and self._world.leads
            and time.monotonic() - self._saved_at > 60 * minutes
            and not self._wished
        )
        self._wished = self._wished or late
        wish = self._world.agreed(STOP if interruption.number else SAVE if late else GO_ON)
        if wish == STOP:
            raise Stopped(interruption.number or 15)
        if due or wish == SAVE:
            self.save()

    def _validate(self, interruption: Interruption) -> dict[str, Any]:
        """Metrics of the validation data into the history's next line; returns details."""
        assert self.val_loader is not None
        for model in {id(one): one for one in (self.model, self.scored)}.values():
            self._world.shared_buffers(model)

        def stop() -> None:
            if self._world.agreed(STOP if interruption.number else GO_ON) == STOP:
                raise Stopped(interruption.number or 15)

        try:
            metrics, details = score(
                self.scored,
                self.val_loader,
                self.task,
                self.config,
                self._device,
                self._world,
                "validating",
                self._tell,
                stop=stop,
            )
        except WdstrainError as error:
            self._data_error = error
            raise
        self._val = metrics
        return details

    def _finish_epoch(self, details: dict[str, Any]) -> None:
        at = self.at
        metrics = self._metrics()
        classes = {
            name: one["classes"]
            for name, one in details.get("heads", {}).items()
            if len(one["classes"]) <= _LISTED
        }
        metrics |= {"classes": classes} if classes else {}
        val = metrics.get("val")
        best, former = val is None or better(self.task, val, at.best), (at.best, at.since_best)
        at.best, at.since_best = (val, 0) if best else (at.best, at.since_best + 1)
        at.history.append(metrics)
        title = self._title
        at.epoch, at.step, at.seconds, self._sums = (
            at.epoch + 1,
            0,
            dict.fromkeys(STAGES, 0.0),
            self._no_sums(),
        )
        self.save(best=best)
        if best and self._failed is not None:
            at.best, at.since_best = former
        try:
            self._keep.epoch(metrics, details)
        except StorageError as error:  # checkpoints are what counts, and they are looked after
            self._tell.line(f"{error} Training goes on.")
        self._tell.line(f"{title}: {_sentence(metrics, self.task)}")
        if metrics.get("overflowed"):
            self._tell.line(
                f"{metrics['overflowed']} losses overflowed 16 bits; their steps were left out."
            )
        self._tell.line(
            textwrap.fill(metrics["verdict"], 78, initial_indent="  ", subsequent_indent="  ")
        )

    # --- what is known of it -----------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"epoch {self.at.epoch + 1}/{self.config.epochs}"

    def _total(self) -> dict[str, float]:
        """Sums of the epoch so far, of all processes."""
        sums = self._sums.clone()
        if self.at.step:  # before the first, the report is that of the epoch before
            sums[-1] += self.loader.report()["bad"]
        return dict(zip(self._names, self._world.reduce(sums).tolist(), strict=True))

    def _no_sums(self) -> Tensor:
        return torch.zeros(len(self._names), dtype=torch.float64, device=self._device)

    def _looked_at(self) -> dict[str, float]:
        """Sums of the epoch so far on this process. Raises WdstrainError if the loss is no number any more."""
        sums = dict(zip(self._names, self._sums.tolist(), strict=True))
        if not math.isfinite(sums["loss"]):
            self._check(sums["loss"])
        if sums["overflowed"] and self.scaler.get_scale() < 1:
            raise WdstrainError(
                f"16 bits overflow step after step at step {self.at.step} of {self._title}, at any scale of the loss. "
                f"Use --amp bf16 or none, or set --clip; checkpoints before it are whole."
            )
        return sums

    def _check(self, loss: float) -> None:
        """Raise WdstrainError if the loss, or a weight, is no number any more: the last loss may be one where its step made weights that are none."""
        sound = all(bool(weight.isfinite().all()) for weight in self.model.parameters())
        if not math.isfinite(loss) or not sound:
            hint = "Look for pictures that hold NaN or infinity, lower" if sound else "Lower"
            raise WdstrainError(
                f"the loss is not a number any more at step {self.at.step} of {self._title}. {hint} --lr (now {self.config.lr}) or "
                f"set --clip; checkpoints before it are whole."
            )

    def _text(self, sums: Mapping[str, float], rate: float) -> str:
        seconds, samples = sum(self.at.seconds.values()), sums["samples"]
        right = [value for name, value in sums.items() if name.startswith("right ")]
        accuracy = (
            f", acc {right[0] / samples:.1%}" if len(right) == 1 and right[0] == right[0] else ""
        )
        stall = (self.at.seconds["data"] + self.at.seconds["copy"]) / max(1e-9, seconds)
        return f"loss {_loss(sums):.3f}{accuracy}, {rate:.0f} samples/s, stall {stall:.0%}"

    def _record(
        self, before: list[float], sums: Mapping[str, float], window: Mapping[str, float]
    ) -> None:
        new = {name: value - old for (name, value), old in zip(sums.items(), before, strict=True)}
        seconds = sum(window.values())
        line = {
            "epoch": self.at.epoch,
            "step": self.at.step,
            "loss": _loss(new),
            "lr": self.optimiser.param_groups[0]["lr"],
            "samples_per_second": new["samples"] * self._world.size / max(1e-9, seconds),
            **{f"{name}_seconds": round(value, 6) for name, value in window.items()},
        }
        try:
            self._keep.record(line)
        except StorageError as error:
            self._tell.line(f"{error} Training goes on.")

    def _metrics(self) -> dict[str, Any]:
        """The line of an epoch. Seconds, stall and verdict are those of the first process."""
        at = self.at
        sums = self._total()
        samples, seconds = sums["samples"], sum(at.seconds.values())
        plan = self.loader.plan(at.epoch)
        metrics: dict[str, Any] = {
            "epoch": at.epoch,
            "loss": _loss(sums),
            "samples": int(samples),
            "left_out": plan.left_out,
            "bad": int(sums["bad"]),
            **({"overflowed": int(sums["overflowed"])} if self.scaler.is_enabled() else {}),
            "lr": self.optimiser.param_groups[0]["lr"],
            "seconds": seconds,
            **{f"{name}_seconds": value for name, value in at.seconds.items()},
            "samples_per_second": samples / max(1e-9, seconds),
            "stall": (at.seconds["data"] + at.seconds["copy"]) / max(1e-9, seconds),
            "verdict": at.verdict,
        }
        several = len(self.task.heads) > 1
        for name, value in sums.items():
            what, _, label = name.partition(" ")
            if what in ("right", "target"):
                plain = {"right": "accuracy", "target": "target_mean"}[what]
                metrics[f"{label}/{plain}" if several else plain] = value / samples
        if self.val_loader is not None:
            val = metrics["val"] = dict(self._val)
            for head in self.task.heads:
                prefix = f"{head.name}/" if several else ""
                if head.kind == "number":  # the error of always predicting the training data's mean
                    mean = metrics[f"{prefix}target_mean"]
                    val[f"{prefix}mse_of_mean"] = (
                        val[f"{prefix}variance"] + (val[f"{prefix}mean"] - mean) ** 2
                    )
        return metrics

    def _verdict(self, seconds: Mapping[str, float]) -> str:
        """What held the epoch back, since it was begun here."""
        report = self.loader.report()
        meter = EpochStats(**{name: report[name] for name in EpochStats.__dataclass_fields__})
        meter.wait_seconds = seconds["data"] + seconds["copy"]
        meter.loop_seconds = sum(seconds.values()) - meter.wait_seconds
        return meter.verdict_of(
            "GPU" if self._device.type == "cuda" else "model",
            seconds["compute"] + seconds["optimiser"],
        )

    # --- state -------------------------------------------------------------------------------------------------------

    def save(self, *, best: bool = False) -> None:
        """Write a checkpoint of now. One that cannot be written is told, and is an error if it is the last."""
        at, total = self.at, self._total()
        self._saved_at, self._wished = time.monotonic(), False
        self._check(total["loss"])
        if not self._world.leads:
            return
        epoch, step = (at.epoch, at.step) if at.step < len(self.loader) else (at.epoch + 1, 0)
        own = {"raw": self.model.state_dict()} if self.average is not None else {}
        state = {
            "format": FORMAT,
            "model": self.scored.state_dict(),
            **own,
            "optimiser": self.optimiser.state_dict(),
            "scaler": self.scaler.state_dict(),
            "position": {"epoch": at.epoch, "step": at.step},
            "sums": total,
            "seconds": at.seconds,
            "verdict": at.verdict,
            "history": at.history,
            "best": at.best,
            "since_best": at.since_best,
            "loader": {**self.loader.state_dict(), "epoch": epoch, "step": step},
            "val": self.val_loader.index.fingerprint if self.val_loader is not None else None,
            "config": vars(self.config),
            "task": self.task.state(),
            "picture": self._picture,
        }
        try:
            self._keep.save(state, at.epoch * len(self.loader) + at.step, best=best)
            self._failed = None
        except StorageError as error:
            self._failed = error
            self._tell.line(f"{error} Training goes on.")

    def load(self, state: Mapping[str, Any]) -> None:
        """Be where a checkpoint was written. Raises UsageError naming what is otherwise here."""
        former = Config.of(state["config"])
        differing = former.differing(self.config)
        if state["task"] != self.task.state():
            differing.append(f"what is learnt was {Task.from_state(state['task'])}, is {self.task}")
        if state["picture"] != self._picture:
            differing.append(f"image was {_words(state['picture'])}, is {_words(self._picture)}")
        val = self.val_loader.index.fingerprint if self.val_loader is not None else None
        if state["val"] != val:
            differing.append("the validation data are others")
        if differing:
            raise UsageError(
                f"the checkpoint is of another run: {'; '.join(differing)}. Use the same values, or another --out."
            )
        self.loader.load_state_dict(state["loader"])
        try:
            self.model.load_state_dict(state.get("raw", state["model"]))
            if self.average is not None:
                self.average.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
        except (RuntimeError, ValueError) as error:
            what = " ".join(str(error).split())[:300]
            raise UsageError(
                f"the checkpoint is of another model: {what}. Use the same model, or another --out."
            ) from error
        self.scaler.load_state_dict(state["scaler"])
        if former.epochs != self.config.epochs and self.config.schedule != "constant":
            self._tell.line(
                f"epochs was {former.epochs}, is {self.config.epochs}: the learning rate goes on as it would be in so many"
            )
        at = self.at = Progress(**state["position"])
        at.history, at.best, at.since_best = (
            list(state["history"]),
            state["best"],
            state["since_best"],
        )
        at.seconds, at.verdict = dict(state["seconds"]), state["verdict"]
        if self._world.leads:  # what all had counted together
            self._sums = torch.tensor(
                [state["sums"].get(name, 0.0) for name in self._names],
                dtype=torch.float64,
                device=self._device,
            )


# --- parts -----------------------------------------------------------------------------------------------------------


class _Snapshot:
    """Sums and buffers (batch norms) before a step of several batches, for one that is broken off between two of them."""

    def __init__(self, sums: Tensor, model: nn.Module) -> None:
        self._sums, self._buffers = sums.clone(), [buffer.clone() for buffer in model.buffers()]

    def restore(self, sums: Tensor, model: nn.Module) -> None:
        sums.copy_(self._sums)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)


def _mixing(task: Task, config: Config) -> Augmentation | None:
    if not config.mixup and not config.cutmix:
        return None
    if len(task.heads) > 1 or task.heads[0].kind not in ("class", "binary"):
        raise UsageError(
            f"mixup={config.mixup}, cutmix={config.cutmix}: they mix classes of one label, and this is {task}."
        )
    head = task.heads[0]
    return Augmentation(
        normalise="imagenet",
        mixup=config.mixup,
        cutmix=config.cutmix,
        classes=len(head.classes),
        label=f"target {head.name}",
    )


def _words(picture: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in picture.items() if name not in ("field", "names")}
    return f"{picture.get('field')}({', '.join(f'{name}={value}' for name, value in rest.items())})"


def _loss(sums: Mapping[str, float]) -> float:
    """The mean loss of the samples whose loss is a number."""
    return sums["loss"] / max(1.0, sums["samples"] - sums["overflowed"])


def _sentence(metrics: Mapping[str, Any], task: Task) -> str:
    val = f"val {short(task, metrics['val'])}, " if "val" in metrics else ""
    return f"loss {metrics['loss']:.3f}, {val}{metrics['samples_per_second']:.0f} samples/s, stall {metrics['stall']:.1%}"
