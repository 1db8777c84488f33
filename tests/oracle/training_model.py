"""Model of training in plain PyTorch: samples, small networks, and a loop that a run must equal.

The loop takes the order of the samples, and augmented pixels, from `wt.Loader`. Labels, losses,
class weights, optimizers, learning rates, averages and metrics are computed here, from the
documentation alone.
"""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import wdstrain as wt

SIDE = 8  # of images, in pixels
NAMES = {"kind": ("ant", "bee", "cow"), "flag": ("no", "yes"), "tags": ("x", "y", "z")}
LABELS = [
    wt.Label("kind", "class", "json", "kind", NAMES["kind"]),
    wt.Label("flag", "class", "json", "flag", NAMES["flag"]),
    wt.Label("tags", "multi", "json", "tags", NAMES["tags"]),
    wt.Label("size", "number", "json", "size"),
]
# (label, kind of its loss, columns of the output) by the text that names them in a run
HEADS = {
    "kind": [("kind", "class", 3)],
    "flag": [("flag", "binary", 1)],
    "flag:class": [("flag", "class", 2)],
    "tags": [("tags", "multi", 3)],
    "size": [("size", "number", 1)],
    "size,kind,tags": [("size", "number", 1), ("kind", "class", 3), ("tags", "multi", 3)],
    "mask.png": [("mask", "mask", 3)],
}
# Losses of torch that equal those of the kinds of labels
LOSSES: dict[str, nn.Module] = {"class": nn.CrossEntropyLoss(), "binary": nn.CrossEntropyLoss()}
LOSSES |= {"multi": nn.BCEWithLogitsLoss(), "number": nn.MSELoss()}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TOLERANT = {"on_error": "replace", "max_errors": 1.0}

Array = npt.NDArray[Any]
Drawn = SimpleNamespace  # a value for each option
Tensors = dict[str, Tensor]


# --- samples --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """values: of the labels, as a loss takes them. fields: of the tar."""

    key: str
    values: dict[str, Any]
    fields: dict[str, Any]


def draw_samples(rng: random.Random, count: int, bad: int, dtype: str) -> list[Sample]:
    """Return random samples; `bad` of them have inputs that cannot be read."""
    numbers = np.random.default_rng(rng.getrandbits(64))
    bad_rows, samples = rng.sample(range(count), bad), []
    for row in range(count):
        kind, flag = int(numbers.integers(3)), int(numbers.random() < 0.3)
        tags, size = numbers.random(3) < 0.4, round(float(numbers.normal(50 + 9 * kind, 5)), 3)
        mask = numbers.integers(0, 3, (SIDE, SIDE)).astype(np.uint8)
        mask[0, :3] = 255
        pixels = numbers.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
        vector = (numbers.random(6) * (255 if dtype == "uint8" else 3)).astype(dtype)
        names: dict[str, Any] = {"kind": NAMES["kind"][kind], "flag": NAMES["flag"][flag]}
        names |= {"tags": np.array(NAMES["tags"])[tags].tolist(), "size": size}
        fields = {"json": names, "mask.png": mask, "png": pixels, "npy": vector}
        if row in bad_rows:
            fields |= {"png": b"\x89PNG\r\n\x1a\n cut", "npy": b"\x93NUMPY cut"}
        values = {"kind": kind, "flag": flag, "tags": tags, "size": size, "mask": mask}
        samples.append(Sample(f"{row:03d}", values, fields))
    return samples


def write(samples: list[Sample], folder: Path, labels: list[wt.Label]) -> None:
    rows = ({"__key__": sample.key, **sample.fields} for sample in samples)
    wt.pack(rows, folder, labels=labels, max_shard_samples=17, shuffle=False, num_workers=1)


@dataclass(frozen=True)
class OwnVector:
    """A field of the user's that reads the vector; with noise, another one in each epoch."""

    dtype: str
    noise: float = 0.0
    names = ("npy",)

    @property
    def example(self) -> wt.Example:
        return wt.Example((6,), self.dtype)

    def read(self, name: str, data: memoryview, out: Array, draws: Array) -> None:
        out[...] = np.load(io.BytesIO(bytes(data))) * (1 + self.noise * draws[0])


def input_options(drawn: Drawn, *, training: bool) -> dict[str, Any]:
    """Return the options of a loader, or of a run, that read the inputs."""
    noise = -0.2 if training and drawn.input == "random field" else 0.0
    if "field" in drawn.input and drawn.input != "image field":
        return {"fields": {"vector": OwnVector(drawn.dtype, noise)}}
    image = wt.image("png", size=SIDE, **image_options(drawn, training=training))
    fields = {"image": image, "vector": wt.array("npy", shape=(6,), dtype=drawn.dtype)}
    names = {"vector": ("vector",), "both": ("image", "vector")}.get(drawn.input, ("image",))
    return {"fields": {name: fields[name] for name in names}}


def image_options(drawn: Drawn, *, training: bool) -> dict[str, Any]:
    """Return the options of an image, which is augmented only in training."""
    names = ("augment", "scale", "ratio", "crop_pct") if training else ("crop_pct",)
    return {name: vars(drawn)[name] for name in names}


def label_field(label: str) -> wt.Field:
    if label == "size":
        return wt.number(f"json.{label}")
    return wt.label(f"json.{label}", classes=NAMES[label], multi=label == "tags")


# --- networks -------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two blocks and a layer of outputs for six features, the sum of those of the inputs."""

    is_checkpointed = False

    def __init__(self, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        # A bias before a batch norm has a gradient of rounding errors alone, which Adam enlarges.
        blocks = (nn.Sequential(nn.Linear(6, 6, bias=False), norm(6), nn.Tanh()) for _ in range(2))
        self.blocks, self.last = nn.Sequential(*blocks), nn.Linear(6, outputs)

    def forward(self, image: Tensor, vector: Tensor | None = None) -> Tensor:
        inputs = [image] if vector is None else [image, vector]
        features = [x if x.ndim == 2 else x.unflatten(3, (2, -1)).mean((2, 4)) for x in inputs]
        features = [sum(x.flatten(1) for x in features)]
        if self.is_checkpointed:
            return self.last(checkpoint(self.blocks, *features, use_reentrant=False))
        return self.last(self.blocks(*features))

    def set_grad_checkpointing(self) -> None:
        self.is_checkpointed = True


def batch_norm(outputs: int) -> nn.Module:
    return Net(outputs, nn.BatchNorm1d)


def layer_norm(outputs: int) -> nn.Module:
    return Net(outputs, nn.LayerNorm)


def dropout(outputs: int) -> nn.Module:
    """A run seeds torch for each step in its own way, so the plain loop cannot have this one."""
    return Net(outputs, lambda width: nn.Dropout(0.3))


def dense(outputs: int) -> nn.Module:
    """A network with outputs for each pixel."""
    torch.manual_seed(3)
    block = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.Tanh())
    return nn.Sequential(block, nn.Conv2d(6, outputs, 1))


NETS = {net.__name__: net for net in (batch_norm, layer_norm, dropout, dense)}


OWN_RATE, OWN_DECAY = 3e-3, 0.02


def own_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups, lr=OWN_RATE, weight_decay=OWN_DECAY)


# --- losses and metrics ---------------------------------------------------------------------------


def class_weights(values: list[Any], kind: str) -> Tensor | None:
    """Return balanced weights: each class counts as often as the others."""
    if kind == "number":
        return None
    if kind == "multi":
        having = torch.tensor(np.array(values)).sum(0)
        return len(values) / (2 * torch.stack([len(values) - having, having], 1).float())
    numbers = torch.tensor(np.concatenate([np.ravel(value) for value in values])).long()
    counts = torch.bincount(numbers[numbers != 255]).float()
    return counts.sum() / (len(counts) * counts)


def loss_of(kind: str, out: Tensor, target: Tensor, smooth: float, weight: Tensor | None) -> Tensor:
    """Return the loss of each sample. smooth: share of a label that all classes get."""
    if kind == "number":
        return (out[:, 0] - target) ** 2
    if kind in ("class", "mask"):
        options = {"label_smoothing": smooth, "ignore_index": 255 if kind == "mask" else -100}
        losses = functional.cross_entropy(out, target, weight, reduction="none", **options)
        return losses if kind == "class" else losses.sum((1, 2)) / (target != 255).sum((1, 2))
    if kind == "binary":
        target = (target[:, 1] if target.ndim == 2 else target.float())[:, None]
    weight = torch.ones(1, 2) if weight is None else weight.view(-1, 2)
    aim = target * (1 - smooth) + smooth / 2
    losses = functional.binary_cross_entropy_with_logits(out, aim, reduction="none")
    return (losses * (weight[:, 0] * (1 - target) + weight[:, 1] * target)).mean(1)


def predictions(kind: str, outputs: Tensor, scale: tuple[float, float]) -> Array:
    """Return what a head predicts: class numbers, flags, or numbers."""
    if kind == "number":
        return np.asarray(outputs[:, 0].double() * scale[1] + scale[0])
    if kind in ("class", "mask"):
        return np.asarray(outputs.argmax(1))
    return np.asarray(outputs > 0) if kind == "multi" else np.asarray(outputs[:, 0] > 0).astype(int)


def f1(predicted: Array, true: Array) -> float:
    """Return F1 of flags."""
    return float(2 * (predicted & true).sum() / max(1, predicted.sum() + true.sum()))


def metrics_of(
    kind: str, columns: int, predicted: Array, true: Array, mean: float
) -> dict[str, float]:
    """Return the metrics of a head. mean: of the numbers in training."""
    if kind == "number":
        error = predicted - true
        squared, of_mean = (error**2).mean(), ((true - mean) ** 2).mean()
        metrics = {"mse": squared, "mae": abs(error).mean(), "mse_of_mean": of_mean}
        return {**metrics, "r2": 1 - squared / true.var()}
    equal = predicted == true
    if kind == "multi":
        each = [f1(*tag) for tag in zip(predicted.T, true.T, strict=True) if tag[1].any()]
        return {"accuracy": equal.mean(), "exact": equal.all(1).mean(), "f1": np.mean(each)}
    if kind == "mask":
        predicted, true = predicted[true != 255], true[true != 255]
        pairs = [(predicted == number, true == number) for number in range(3)]
        shares = [(a & b).sum() / (a | b).sum() for a, b in pairs if (a | b).any()]
        return {"mIoU": np.mean(shares), "pixel_accuracy": (predicted == true).mean()}
    recalls = [equal[true == number].mean() for number in np.unique(true)]
    metrics = {"accuracy": equal.mean(), "balanced_accuracy": np.mean(recalls)}
    if columns < 3:
        hits, guesses = (predicted & true).sum(), max(1, predicted.sum())
        metrics |= {"precision": hits / guesses, "recall": hits / max(1, true.sum())}
        return {**metrics, "f1": f1(predicted == 1, true == 1)}
    return {**metrics, "f1": np.mean([f1(predicted == n, true == n) for n in np.unique(true)])}


# --- the loop -------------------------------------------------------------------------------------


def learning_rate(drawn: Drawn, update: int, updates: int, plateaus: int) -> float:
    """Return the rate of one update. updates: of an epoch."""

    def falling(high: float, low: float, share: float) -> float:
        return low + (high - low) * (1 + math.cos(math.pi * share)) / 2

    total, warmup, factor = updates * drawn.epochs, round(drawn.warmup * updates), 1.0
    top = max(1e-9, 0.3 * total - 1)
    if drawn.schedule == "onecycle" and update <= top:  # as torch's OneCycleLR by default
        factor = falling(1 / 25, 1, update / top)
    elif drawn.schedule == "onecycle":
        factor = falling(1, 1 / 25e4, (update - top) / (total - 1 - top))
    elif update < warmup:
        factor = (update + 1) / warmup
    elif drawn.schedule == "cosine":
        factor = falling(1, 0, (update - warmup) / (total - warmup))
    elif drawn.schedule == "step":
        factor = 0.1 ** (update // updates // (drawn.step_epochs or math.ceil(drawn.epochs / 3)))
    elif drawn.schedule == "plateau":
        factor = 0.1**plateaus
    peak = OWN_RATE if drawn.optimizer.startswith("own") else drawn.lr
    low = min(1.0, drawn.min_lr / peak)
    return peak * (low + (1 - low) * factor)


@dataclass
class PlainRun:
    """A run of the plain loop.

    epochs: figures of each epoch. weights: state dicts at the end of each epoch. raw: of the model
    that is trained, where `weights` are averages.
    """

    drawn: Drawn
    train: list[Sample]
    val: list[Sample]
    folder: Path
    epochs: list[dict[str, Any]] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
    raw: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = np.array([sample.values["size"] for sample in self.train])
        self.scale, self.heads = (sizes.mean(), sizes.std()), HEADS[self.drawn.label]
        self.balanced = [
            class_weights([sample.values[label] for sample in self.train], kind)
            if self.drawn.class_weights == "balanced"
            else None
            for label, kind, _ in self.heads
        ]

    def net(self) -> nn.Module:
        return NETS[self.drawn.net](sum(columns for *_, columns in self.heads))

    def loader(self, *, training: bool, errors: Mapping[str, Any]) -> wt.Loader:
        drawn, options = self.drawn, input_options(self.drawn, training=training)
        options |= {"batch_size": drawn.batch_size, **errors}
        if drawn.label == "mask.png":
            shown = image_options(drawn, training=training)
            options["fields"]["mask"] = wt.mask(size=SIDE, **shown)
        if not training:
            return wt.Loader(self.folder / "val", **options, shuffle=False, tail="keep")
        if drawn.mixup or drawn.cutmix:
            options["fields"]["label"] = label_field(self.heads[0][0])
        options |= {name: vars(drawn)[name] for name in ("seed", "balance", "shuffle_buffer")}
        return wt.Loader(self.folder / "train", **options, lanes=drawn.lanes)

    def augmentation(self, epoch: int) -> wt.Augmentation | None:
        """Return what mixes the batches of an epoch, and changes their colors."""
        drawn, off = self.drawn, self.drawn.mixup_off_epoch
        if not (drawn.random_erasing or drawn.color_jitter or drawn.mixup or drawn.cutmix):
            return None
        options = dict.fromkeys(("brightness", "contrast", "saturation"), drawn.color_jitter)
        options |= {"random_erasing": drawn.random_erasing, "normalize": (MEAN, STD)}
        if off is None or epoch < off:
            options |= {"mixup": drawn.mixup, "cutmix": drawn.cutmix}
            options |= {"mixup_prob": drawn.mixup_prob, "classes": max(2, self.heads[0][2])}
        return wt.Augmentation(**options)

    def call(self, model: nn.Module, batch: Mapping[str, Any], *, amp: bool = True) -> list[Tensor]:
        """Return the outputs of each head."""
        inputs = [
            normalized(batch[name]).contiguous() for name in ("image", "vector") if name in batch
        ]
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.drawn.amp)
        with torch.autocast("cpu", dtype, enabled=amp and dtype is not None):
            outputs = model(*inputs)
        return list(outputs.float().split([columns for *_, columns in self.heads], 1))

    def losses(
        self, outputs: list[Tensor], batch: Mapping[str, Any], samples: list[Sample], training: bool
    ) -> Tensor:
        """Return the loss of each sample of a batch."""
        by_key = {sample.key: sample.values for sample in samples}
        smooth = self.drawn.label_smoothing if training else 0.0
        total = torch.zeros(len(outputs[0]))
        for (label, kind, _), own, weight in zip(self.heads, outputs, self.balanced, strict=True):
            values = np.array([by_key[key][label] for key in batch["__key__"]])
            if kind == "number":
                values = ((values - self.scale[0]) / self.scale[1]).astype(np.float32)
            target = torch.from_numpy(values.astype(np.float32) if kind == "multi" else values)
            target = batch.get("label", batch.get("mask", target))  # mixed, or augmented
            if callable(self.drawn.criterion):
                total = total + self.drawn.criterion(own[:, 0], target)
            else:
                total = total + loss_of(kind, own, target, smooth, weight if training else None)
        return total

    def val_batches(
        self, limit: int | None = None, errors: Mapping[str, Any] = TOLERANT
    ) -> Iterator[dict[str, Any]]:
        """Yield the batches of validation, without bad samples."""
        with closing(self.loader(training=False, errors=errors)) as loader:
            batches = loader.epoch(0)
            for step, batch in enumerate(batches):
                own = batches.delivered.own.copy()
                keys = [key for key, good in zip(batch["__key__"], own, strict=True) if good]
                if keys:
                    yield {n: v[own] if isinstance(v, Tensor) else keys for n, v in batch.items()}
                if step + 1 == limit:
                    return

    @torch.no_grad()
    def score(self, model: nn.Module, *options: Any) -> dict[str, float]:
        """Return the metrics of a model on the validation set. options: of `val_batches`."""
        model.eval()
        losses, predicted, keys = [], [], []
        for batch in self.val_batches(*options):
            outputs = self.call(model, batch)
            losses.append(self.losses(outputs, batch, self.val, training=False))
            heads = zip(self.heads, outputs, strict=True)
            predicted.append([predictions(kind, own, self.scale) for (_, kind, _), own in heads])
            keys += batch["__key__"]
        columns = [np.concatenate(parts) for parts in zip(*predicted, strict=True)]
        loss = float(torch.cat(losses).double().mean())
        return {"loss": loss, "samples": len(keys), **self.metrics(columns, keys)}

    def metrics(self, predicted: list[Array], keys: list[str]) -> dict[str, float]:
        """Return the metrics of predictions, by head, for these samples of the validation set."""
        by_key = {sample.key: sample.values for sample in self.val}
        metrics: dict[str, float] = {}
        for (label, kind, columns), own in zip(self.heads, predicted, strict=True):
            prefix = f"{label}/" if len(self.heads) > 1 else ""
            true = np.array([by_key[key][label] for key in keys])
            scores = metrics_of(kind, columns, own, true, self.scale[0])
            metrics |= {f"{prefix}{name}": value for name, value in scores.items()}
        return metrics

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        drawn, groups = self.drawn, []
        for name, weight in model.named_parameters():
            is_backbone = name.rpartition(".")[0][:-2] in ("blocks.0", "blocks.1", "0")
            scale = drawn.backbone_lr if is_backbone else 1.0
            is_own = drawn.optimizer.startswith("own")
            decay = (OWN_DECAY if is_own else drawn.weight_decay) if weight.ndim > 1 else 0.0
            groups.append({"params": [weight], "weight_decay": decay, "lr": 1.0, "scale": scale})
        sgd = {"momentum": drawn.momentum, "nesterov": drawn.momentum > 0}
        return {
            "adamw": lambda: torch.optim.AdamW(groups),
            "sgd": lambda: torch.optim.SGD(groups, **sgd),
        }.get(drawn.optimizer, lambda: own_optimizer(groups))()

    def set_mode(self, model: nn.Module, epoch: int) -> None:
        """Set the training mode; frozen layers are as in validation."""
        drawn = self.drawn
        model.train().requires_grad_(True)
        if drawn.freeze and not (
            drawn.unfreeze_epoch is not None and epoch >= drawn.unfreeze_epoch
        ):
            layers = {"backbone": "0" if drawn.net == "dense" else "blocks"}
            frozen = model.get_submodule(layers.get(drawn.freeze, drawn.freeze))
            frozen.requires_grad_(False).eval()

    def run(self) -> PlainRun:
        """Train. Raises SampleError where a loader does."""
        drawn, model, slower, since_best = self.drawn, self.net(), 1.0, 0
        if drawn.weights:
            model.load_state_dict(torch.load(self.folder / drawn.weights))
        average, optimizer = copy.deepcopy(model), self.optimizer(model)
        scaler = torch.amp.GradScaler("cpu", enabled=drawn.amp == "fp16")
        with closing(self.loader(training=True, errors=drawn.errors)) as loader:
            steps = min(len(loader), drawn.limit_train_batches or len(loader))
            updates = math.ceil(steps / drawn.accumulate)
            for epoch in range(drawn.epochs):
                self.set_mode(model, epoch)
                batches = wt.to_device(loader.epoch(epoch), "cpu", self.augmentation(epoch))
                losses: list[Tensor] = []
                for update in range(epoch * updates, (epoch + 1) * updates):
                    rate = slower * learning_rate(drawn, update, updates, self.plateaus())
                    for group in optimizer.param_groups:
                        group["lr"] = rate * group["scale"]
                    optimizer.zero_grad()
                    count = min(drawn.accumulate, steps - len(losses))
                    for _ in range(count):
                        batch = next(batches)
                        outputs = self.call(model, batch)
                        loss = self.losses(outputs, batch, self.train, training=True)
                        scaler.scale(loss.mean() / count).backward()
                        losses.append(loss.detach())
                    scaler.unscale_(optimizer)
                    if drawn.clip_norm:
                        nn.utils.clip_grad_norm_(model.parameters(), drawn.clip_norm)
                    if drawn.clip_value:
                        nn.utils.clip_grad_value_(model.parameters(), drawn.clip_value)
                    scaler.step(optimizer)
                    scaler.update()
                    add_to_average(average, model, min(drawn.ema, (1 + update) / (10 + update)))
                line: dict[str, Any] = {
                    "loss": float(torch.cat(losses).double().mean()),
                    "lr": rate,
                }
                line |= {"bad": loader.report()["bad"], "samples": len(torch.cat(losses))}
                if drawn.val == "val":
                    models = {"val": average, "val_raw": model} if drawn.ema else {"val": model}
                    options = (drawn.limit_val_batches, drawn.errors)
                    line |= {name: self.score(scored, *options) for name, scored in models.items()}
                self.epochs.append(line)
                self.weights.append(copy.deepcopy((average if drawn.ema else model).state_dict()))
                slower = 0.5 if drawn.slower else 1.0
                since_best = 0 if self.best() == epoch else since_best + 1
                if 0 < drawn.patience <= since_best:
                    break
        self.raw = model.state_dict() if drawn.ema else {}
        return self

    def values(self) -> list[float]:
        """Return the monitored metric of each epoch; more is better."""
        main = {"class": "accuracy", "binary": "accuracy", "number": "mse", "mask": "mIoU"}
        name = self.drawn.monitor or ("loss" if self.heads[1:] else main[self.heads[0][1]])
        sign = -1 if name.rpartition("/")[2] in ("loss", "mse", "mae") else 1
        return [sign * line["val"][name] for line in self.epochs]

    def best(self) -> int:
        """Return the best epoch: the first of equal ones; without validation the last."""
        return len(self.epochs) - 1 if self.drawn.val == "none" else int(np.argmax(self.values()))

    def plateaus(self) -> int:
        """Return how often `plateau_epochs` in a row were not better than those before."""
        best, waited, plateaus = -math.inf, 0, 0
        for value in self.values() if self.drawn.schedule == "plateau" else []:
            best, waited = (value, 0) if value > best else (best, waited + 1)
            if waited == self.drawn.plateau_epochs:
                plateaus, waited = plateaus + 1, 0
        return plateaus


@torch.no_grad()
def add_to_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    current = model.state_dict()
    for name, value in average.state_dict().items():
        is_float = value.is_floating_point()
        value.copy_(torch.lerp(value, current[name], 1 - decay) if is_float else current[name])


def normalized(value: Tensor) -> Tensor:
    """Return an input as a model gets it."""
    if value.dtype != torch.uint8 or value.ndim == 2:
        return value.float() / (255 if value.dtype == torch.uint8 else 1)
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (value.float() - mean) / std
