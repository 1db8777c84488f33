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
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import wdstrain as wt

SIDE = 8
NAMES = {"kind": ("ant", "bee", "cow"), "flag": ("no", "yes"), "tags": ("x", "y", "z")}
LAYERS = "sky,sea,sun"  # classes of masks
LABELS = [
    wt.Label("kind", "class", "json", "kind", NAMES["kind"]),
    wt.Label("flag", "class", "json", "flag", NAMES["flag"]),
    wt.Label("tags", "multi", "json", "tags", NAMES["tags"]),
    wt.Label("size", "number", "json", "size"),
]
# (label, kind of its loss) by the text that names them in a run
HEADS = {
    "kind": [("kind", "class")],
    "flag": [("flag", "binary")],
    "flag:class": [("flag", "class")],
    "tags": [("tags", "multi")],
    "size": [("size", "number")],
    "size,kind,tags,flag": [
        ("size", "number"),
        ("kind", "class"),
        ("tags", "multi"),
        ("flag", "binary"),
    ],
    "mask.png": [("mask", "mask")],
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MINIMIZED = ("loss", "mse", "mae")
TOLERANT = {"on_error": "replace", "max_errors": 1.0}

Options = Mapping[str, Any]
Array = npt.NDArray[Any]


# --- samples --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """values: of the labels, as a loss takes them. fields: of the tar."""

    key: str
    values: dict[str, Any]
    fields: dict[str, Any]


def draw_samples(rng: random.Random, count: int, bad: int, dtype: str) -> list[Sample]:
    """Return random samples, of which `bad` have inputs that cannot be read."""
    numbers = np.random.default_rng(rng.getrandbits(64))
    bad_rows = set(rng.sample(range(count), bad))
    samples = []
    for row in range(count):
        kind, flag = int(numbers.integers(0, 3)), int(numbers.random() < 0.3)
        tags = numbers.random(3) < 0.4
        size = round(float(numbers.normal(50 + 9 * kind, 5)), 3)
        mask = numbers.integers(0, 3, (SIDE, SIDE)).astype(np.uint8)
        mask[0, :3] = 255
        pixels = numbers.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
        vector = (numbers.random(6) * 255).astype(dtype)
        if dtype != "uint8":
            vector /= 100
        file = io.BytesIO()
        np.save(file, vector)
        labels = {
            "kind": NAMES["kind"][kind],
            "flag": NAMES["flag"][flag],
            "tags": [name for name, has in zip(NAMES["tags"], tags, strict=True) if has],
            "size": size,
        }
        fields = {"json": labels, "mask.png": png(mask), "png": png(pixels), "npy": file.getvalue()}
        if row in bad_rows:
            fields |= {"png": png(pixels)[:60], "npy": file.getvalue()[:-3]}
        values = {"kind": kind, "flag": flag, "tags": tags, "size": size, "mask": mask}
        samples.append(Sample(f"{row:03d}", values, fields))
    return samples


def png(pixels: Array) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write(samples: list[Sample], folder: Path) -> None:
    """Write the shards of some samples in their order."""
    rows = ({"__key__": sample.key, **sample.fields} for sample in samples)
    wt.pack(rows, folder, labels=LABELS, max_shard_samples=17, shuffle=False, num_workers=1)


def vector_of(sample: Mapping[str, Any]) -> dict[str, Array]:
    return {"vector": np.load(io.BytesIO(bytes(sample["npy"])))}


def noisy_vector(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Array]:
    vector = vector_of(sample)["vector"]
    return {"vector": (vector * rng.uniform(0.8, 1.2, 6)).astype(vector.dtype)}


def input_options(drawn: Options, *, training: bool) -> dict[str, Any]:
    """Return the options of a loader, or of a run, that read the inputs."""
    augment = drawn["augment"] if training else None
    image = wt.image("png", size=SIDE, augment=augment)
    vector = wt.array("npy", shape=(6,), dtype=drawn["dtype"])
    return {
        "image": {"fields": {"image": image}},
        "image field": {"fields": {"image": image}},
        "vector": {"fields": {"vector": vector}},
        "both": {"fields": {"image": image, "vector": vector}},
        "transform": {"transform": vector_of},
        "random transform": {"transform": noisy_vector if training else vector_of},
    }[drawn["input"]]


# --- networks -------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two blocks and a layer of outputs for six features, the sum of those of the inputs."""

    def __init__(self, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        # A bias before a batch norm has a gradient of rounding errors alone, which Adam enlarges.
        blocks = (nn.Sequential(nn.Linear(6, 6, bias=False), norm(6), nn.Tanh()) for _ in range(2))
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Linear(6, outputs)

    def forward(self, image: Tensor, vector: Tensor | None = None) -> Tensor:
        inputs = [image] if vector is None else [image, vector]
        features = [x if x.ndim == 2 else x.unflatten(3, (2, -1)).mean((2, 4)) for x in inputs]
        return self.last(self.blocks(sum(x.flatten(1) for x in features)))


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


def own_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups)


class PlainLion(torch.optim.Optimizer):
    """Lion, as in the paper's algorithm 2 with betas 0.9 and 0.99."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state.get(weight, {}).get("m", torch.zeros_like(weight))
                update = torch.sign(0.9 * momentum + (1 - 0.9) * weight.grad)
                weight.sub_(group["lr"] * (update + group["weight_decay"] * weight))
                self.state[weight]["m"] = 0.99 * momentum + (1 - 0.99) * weight.grad


# --- losses and metrics ---------------------------------------------------------------------------


def columns(label: str, kind: str) -> int:
    return {"binary": 1, "number": 1, "mask": 3}.get(kind) or len(NAMES[label])


def split(drawn: Options, outputs: Tensor) -> list[Tensor]:
    return list(outputs.float().split([columns(*head) for head in HEADS[drawn["label"]]], 1))


def class_weights(samples: list[Sample], label: str, kind: str) -> Tensor | None:
    """Return balanced weights: each class counts as often as the others."""
    values = [sample.values[label] for sample in samples]
    if kind == "number":
        return None
    if kind == "multi":
        having = torch.tensor(np.array(values)).sum(0)
        both = torch.stack([len(values) - having, having], 1).float()
        return len(values) / (2 * both)
    numbers = torch.tensor(np.concatenate([np.atleast_1d(v).ravel() for v in values])).long()
    counts = torch.bincount(numbers[numbers != 255]).float()
    return counts.sum() / (len(counts) * counts)


def loss_of(
    kind: str, outputs: Tensor, target: Tensor, smoothing: float, weight: Tensor | None
) -> Tensor:
    """Return the loss of each sample."""
    if kind == "number":
        return (outputs[:, 0] - target) ** 2
    if kind in ("class", "mask"):
        losses = functional.cross_entropy(
            outputs,
            target,
            weight,
            label_smoothing=smoothing,
            ignore_index=255 if kind == "mask" else -100,
            reduction="none",
        )
        if kind == "class":
            return losses
        return losses.sum((1, 2)) / (target != 255).sum((1, 2))
    if kind == "binary":
        share = (target[:, 1] if target.ndim == 2 else target.float())[:, None]
        weight = torch.ones(1, 2) if weight is None else weight[None]
    else:
        share, weight = target, torch.ones(1, 2) if weight is None else weight
    aim = share * (1 - smoothing) + smoothing / 2
    losses = functional.binary_cross_entropy_with_logits(outputs, aim, reduction="none")
    return (losses * (weight[:, 0] * (1 - share) + weight[:, 1] * share)).mean(1)


def own_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """A criterion for classes and numbers; a scalar for numbers."""
    if outputs.ndim == 1:
        return functional.smooth_l1_loss(outputs, target)
    return functional.multi_margin_loss(outputs, target, reduction="none")


def predictions(kind: str, outputs: Tensor, scale: tuple[float, float]) -> Array:
    """Return what a head predicts: class numbers, flags, or numbers."""
    if kind == "number":
        return np.asarray(outputs[:, 0].double() * scale[1] + scale[0])
    if kind in ("binary", "multi"):
        flags = np.asarray(outputs > 0)
        return flags if kind == "multi" else flags[:, 0].astype(int)
    return np.asarray(outputs.argmax(1))


def metrics_of(kind: str, predicted: Array, true: Array) -> dict[str, float]:
    """Return metrics of predictions, in NumPy."""
    if kind == "number":
        error = predicted - true
        metrics = {"mse": (error**2).mean(), "mae": abs(error).mean()}
        return metrics | {"r2": 1 - metrics["mse"] / true.var()}
    equal = predicted == true
    if kind == "multi":
        return {"accuracy": equal.mean(), "exact": equal.all(1).mean()}
    if kind == "mask":
        real = true != 255
        predicted, true, equal = predicted[real], true[real], equal[real]
        unions = [((predicted == n) | (true == n)).sum() for n in range(3)]
        hits = [(equal & (true == n)).sum() for n in range(3)]
        shares = [hit / union for hit, union in zip(hits, unions, strict=True) if union]
        return {"mIoU": np.mean(shares), "pixel_accuracy": equal.mean()}
    recalls = [equal[true == number].mean() for number in np.unique(true)]
    return {"accuracy": equal.mean(), "balanced_accuracy": np.mean(recalls)}


# --- the loop -------------------------------------------------------------------------------------


def learning_rate(drawn: Options, update: int, updates: int, plateaus: int) -> float:
    """Return the rate of one update. updates: of an epoch."""
    total, low, peak = updates * drawn["epochs"], drawn["min_lr"], drawn["lr"]
    warmup = round(drawn["warmup"] * updates)

    def falling(high: float, end: float, share: float) -> float:
        return end + (high - end) * (1 + math.cos(math.pi * share)) / 2

    if drawn["schedule"] == "onecycle":  # as torch.optim.lr_scheduler.OneCycleLR by default
        top = 0.3 * total - 1
        if update <= top:
            factor = falling(1 / 25, 1, update / top)
        else:
            factor = falling(1, 1 / 25e4, (update - top) / (total - 1 - top))
    elif update < warmup:
        factor = (update + 1) / warmup
    elif drawn["schedule"] == "cosine":
        factor = falling(1, 0, (update - warmup) / (total - warmup))
    elif drawn["schedule"] == "step":
        every = drawn["step_epochs"] or math.ceil(drawn["epochs"] / 3)
        factor = 0.1 ** (update // updates // every)
    else:
        factor = 0.1**plateaus if drawn["schedule"] == "plateau" else 1.0
    return low + (peak - low) * factor


@dataclass
class PlainRun:
    """A run of the plain loop.

    epochs: figures of each epoch. weights: state dicts at the end of each epoch. raw: of the model
    that is trained, where `weights` are averages.
    """

    drawn: Options
    train: list[Sample]
    val: list[Sample]
    folder: Path
    epochs: list[dict[str, Any]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    raw: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = np.array([sample.values["size"] for sample in self.train])
        self.scale = (float(sizes.mean()), float(sizes.std()))
        self.heads = HEADS[self.drawn["label"]]
        balanced = self.drawn["class_weights"] == "balanced"
        self.class_weights = [
            class_weights(self.train, *head) if balanced else None for head in self.heads
        ]

    def net(self) -> nn.Module:
        return NETS[self.drawn["net"]](sum(columns(*head) for head in self.heads))

    def loader(self, *, training: bool, errors: Options) -> wt.Loader:
        drawn = self.drawn
        options = {"batch_size": drawn["batch_size"], **errors}
        options |= input_options(drawn, training=training)
        if not training:
            return wt.Loader(self.folder / "val", **options, shuffle=False, tail="keep")
        fields: dict[str, Any] = {}
        if drawn["label"] == "mask.png":
            fields["mask"] = wt.mask(size=SIDE, augment=drawn["augment"])
        elif drawn["mixup"] or drawn["cutmix"]:
            fields["label"] = wt.label("json", column=self.heads[0][0])
        if fields:
            options["fields"] = options["fields"] | fields
        names = ("seed", "balance", "shuffle_buffer", "lanes")
        return wt.Loader(self.folder / "train", **options, **{name: drawn[name] for name in names})

    def augmentation(self, epoch: int) -> wt.Augmentation | None:
        drawn = self.drawn
        names = ("random_erasing", "mixup", "cutmix")
        used = {name: drawn[name] for name in names if drawn[name]}
        if drawn["color_jitter"]:
            used |= dict.fromkeys(("brightness", "contrast", "saturation"), drawn["color_jitter"])
        if not used:
            return None
        if drawn["mixup_off_epoch"] is not None and epoch >= drawn["mixup_off_epoch"]:
            used |= {"mixup": 0.0, "cutmix": 0.0}
        classes = len(NAMES[self.heads[0][0]]) if drawn["mixup"] or drawn["cutmix"] else None
        more = {"mixup_prob": drawn["mixup_prob"], "classes": classes, "normalize": (MEAN, STD)}
        return wt.Augmentation(**used, **more)

    def targets(self, samples: list[Sample], batch: Mapping[str, Any]) -> list[Tensor]:
        """Return the target of each head; numbers in standard deviations."""
        by_key = {sample.key: sample.values for sample in samples}
        targets = []
        for label, kind in self.heads:
            values = np.array([by_key[key][label] for key in batch["__key__"]])
            target = torch.from_numpy(values)
            if kind == "number":
                target = ((target - self.scale[0]) / self.scale[1]).float()
            targets.append(target.float() if kind == "multi" else target)
            if kind == "mask":
                targets[-1] = batch.get("mask", target.long())
        return [batch["label"]] if "label" in batch else targets

    def call(self, model: nn.Module, batch: Mapping[str, Any], *, amp: bool = True) -> list[Tensor]:
        """Return the outputs of each head."""
        inputs = [normalized(batch[name]) for name in ("image", "vector") if name in batch]
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.drawn["amp"])
        with torch.autocast("cpu", dtype, enabled=amp and dtype is not None):
            outputs = model(*inputs)
        return split(self.drawn, outputs)

    def losses(self, outputs: list[Tensor], targets: list[Tensor], *, training: bool) -> Tensor:
        smoothing = self.drawn["label_smoothing"] if training else 0.0
        weights = self.class_weights if training else [None] * len(self.heads)
        total = torch.zeros(len(outputs[0]))
        for (_, kind), own, target, weight in zip(
            self.heads, outputs, targets, weights, strict=True
        ):
            if self.drawn["criterion"]:
                total = total + own_loss(own[:, 0] if kind == "number" else own, target)
            else:
                total = total + loss_of(kind, own, target, smoothing, weight)
        return total

    def val_batches(
        self, limit: int | None = None, errors: Options = TOLERANT
    ) -> Iterator[dict[str, Any]]:
        """Yield the batches of validation, without bad samples."""
        with closing(self.loader(training=False, errors=errors)) as loader:
            batches = loader.epoch(0)
            for step, batch in enumerate(batches):
                own = batches.own
                keys = [key for key, good in zip(batch["__key__"], own, strict=True) if good]
                rows = torch.from_numpy(own)
                if keys:
                    yield {n: v[rows] if isinstance(v, Tensor) else keys for n, v in batch.items()}
                if step + 1 == limit:
                    return

    @torch.no_grad()
    def score(
        self, model: nn.Module, limit: int | None = None, errors: Options = TOLERANT
    ) -> dict[str, float]:
        """Return the metrics of a model on the validation set."""
        model.eval()
        parts, losses = [], []
        for batch in self.val_batches(limit, errors):
            outputs, targets = self.call(model, batch), self.targets(self.val, batch)
            losses.append(self.losses(outputs, targets, training=False))
            predicted = [
                predictions(kind, own, self.scale)
                for (_, kind), own in zip(self.heads, outputs, strict=True)
            ]
            parts.append((predicted, batch["__key__"]))
        predicted = [np.concatenate(values) for values in zip(*(p for p, _ in parts), strict=True)]
        keys = [key for _, some in parts for key in some]
        return {
            "loss": float(torch.cat(losses).double().mean()),
            "samples": len(keys),
            **self.metrics(predicted, keys),
        }

    def metrics(self, predicted: list[Array], keys: list[str]) -> dict[str, float]:
        """Return the metrics of predictions for these samples of the validation set."""
        by_key, metrics = {sample.key: sample.values for sample in self.val}, {}
        for (label, kind), own in zip(self.heads, predicted, strict=True):
            prefix = f"{label}/" if len(self.heads) > 1 else ""
            true = np.array([by_key[key][label] for key in keys])
            metrics |= {f"{prefix}{n}": v for n, v in metrics_of(kind, own, true).items()}
        return metrics

    # --- training ---------------------------------------------------------------------------------

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        drawn, groups = self.drawn, []
        for name, weight in model.named_parameters():
            depth = 0 if name.startswith(("last.", "1.")) else 2 - int(name.split(".")[-3])
            depth = min(depth, 1) if drawn["label"] == "mask.png" else depth
            scale = drawn["backbone_lr"] * drawn["layer_decay"] ** depth if depth else 1.0
            decay = drawn["weight_decay"] if weight.ndim > 1 else 0.0
            groups.append({"params": [weight], "weight_decay": decay, "lr": 1.0, "scale": scale})
        if drawn["optimizer"] == "adamw":
            return torch.optim.AdamW(groups)
        if drawn["optimizer"] == "lion":
            return PlainLion(groups)
        if drawn["optimizer"] == "sgd":
            momentum = drawn["momentum"]
            return torch.optim.SGD(groups, momentum=momentum, nesterov=momentum > 0)
        return own_optimizer(groups)

    def freeze(self, model: nn.Module, epoch: int) -> None:
        """Set the training mode, with frozen layers in the mode of evaluation."""
        drawn = self.drawn
        model.train().requires_grad_(True)
        thawed = drawn["unfreeze_epoch"] is not None and epoch >= drawn["unfreeze_epoch"]
        if drawn["freeze"] is None or thawed:
            return
        layers = {"backbone": "blocks", "blocks.0": "blocks.0"}[drawn["freeze"]]
        layers = "0" if drawn["label"] == "mask.png" else layers
        model.get_submodule(layers).requires_grad_(False).eval()

    def run(self) -> PlainRun:
        """Train. Raises SampleError where a loader does."""
        drawn, model = self.drawn, self.net()
        average, optimizer = copy.deepcopy(model), self.optimizer(model)
        scaler = torch.amp.GradScaler("cpu", enabled=drawn["amp"] == "fp16")
        scored, waited, slower = average if drawn["ema"] else model, 0, 1.0
        limited = (drawn["limit_val_batches"], drawn["errors"])
        with closing(self.loader(training=True, errors=drawn["errors"])) as loader:
            steps = min(len(loader), drawn["limit_train_batches"] or len(loader))
            updates = math.ceil(steps / drawn["accumulate"])
            for epoch in range(drawn["epochs"]):
                self.freeze(model, epoch)
                batches = wt.to_device(loader.epoch(epoch), "cpu", self.augmentation(epoch))
                losses, hits = [], []
                for update in range(epoch * updates, (epoch + 1) * updates):
                    left = steps - (update - epoch * updates) * drawn["accumulate"]
                    group = min(drawn["accumulate"], left)
                    rate = learning_rate(drawn, update, updates, self.plateaus())
                    for part in optimizer.param_groups:
                        part["lr"] = rate * slower * part["scale"]
                    optimizer.zero_grad()
                    for _ in range(group):
                        batch = next(batches)
                        outputs = self.call(model, batch)
                        targets = self.targets(self.train, batch)
                        loss = self.losses(outputs, targets, training=True)
                        scaler.scale(loss.mean() / group).backward()
                        losses.append(loss.detach())
                        hits.append(self.hits(outputs, targets))
                    scaler.unscale_(optimizer)
                    self.clip(model)
                    scaler.step(optimizer)
                    scaler.update()
                    add_to_average(average, model, min(drawn["ema"], (1 + update) / (10 + update)))
                line = {"loss": float(torch.cat(losses).double().mean()), "lr": rate * slower}
                line |= {"bad": loader.report()["bad"], "samples": len(torch.cat(losses))}
                line |= {n: np.mean([hit[n] for hit in hits]) for n in hits[0]}
                if drawn["val"] != "none":
                    line["val"] = self.score(scored, *limited)
                    if drawn["ema"]:
                        line["val_raw"] = self.score(model, *limited)
                self.epochs.append(line)
                self.weights.append(copy.deepcopy(scored.state_dict()))
                waited = 0 if self.best() == epoch else waited + 1
                slower = 0.5 if drawn["slower"] else 1.0
                if 0 < drawn["patience"] <= waited:
                    break
        self.raw = model.state_dict()
        return self

    def hits(self, outputs: list[Tensor], targets: list[Tensor]) -> dict[str, float]:
        """Return the accuracy of each class label on one batch."""
        accuracy = {}
        for (label, kind), own, target in zip(self.heads, outputs, targets, strict=True):
            if kind in ("class", "binary"):
                true = target.argmax(1) if target.ndim == 2 else target
                name = f"{label}/accuracy" if len(self.heads) > 1 else "accuracy"
                accuracy[name] = (predictions(kind, own, self.scale) == true.numpy()).mean()
        return accuracy

    def clip(self, model: nn.Module) -> None:
        if self.drawn["clip_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), self.drawn["clip_norm"])
        if self.drawn["clip_value"]:
            nn.utils.clip_grad_value_(model.parameters(), self.drawn["clip_value"])

    @property
    def monitor(self) -> str:
        """Return the metric that chooses the best epoch."""
        main = {"class": "accuracy", "binary": "accuracy", "number": "mse", "mask": "mIoU"}
        return self.drawn["monitor"] or ("loss" if self.heads[1:] else main[self.heads[0][1]])

    def values(self) -> list[float]:
        """Return the monitored values of validation; more is better."""
        sign = -1 if self.monitor.rpartition("/")[2] in MINIMIZED else 1
        return [sign * line["val"][self.monitor] for line in self.epochs]

    def best(self) -> int:
        """Return the best epoch: the first of equal ones; without validation the last."""
        if self.drawn["val"] == "none":
            return len(self.epochs) - 1
        return int(np.argmax(self.values()))

    def plateaus(self) -> int:
        """Return how often the rate fell because `plateau_epochs` in a row were not better."""
        if self.drawn["schedule"] != "plateau":
            return 0
        best, waited, plateaus = -math.inf, 0, 0
        for value in self.values():
            best, waited = (value, 0) if value > best else (best, waited + 1)
            if waited == self.drawn["plateau_epochs"]:
                plateaus, waited = plateaus + 1, 0
        return plateaus


@torch.no_grad()
def add_to_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    current = model.state_dict()
    for name, value in average.state_dict().items():
        is_float = value.is_floating_point()
        value.copy_(decay * value + (1 - decay) * current[name] if is_float else current[name])


def normalized(value: Tensor) -> Tensor:
    """Return an input as a model gets it."""
    if value.dtype != torch.uint8:
        return value.float()
    if value.ndim == 2:
        return value.float() / 255
    mean, std = (255 * torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (value.float() - mean) / std
