"""Options of a training run, by purpose.

Each is declared once: it is a flag, a key of a file of options, a keyword argument of `wt.train`,
and a line of a run's config.toml. `wdstrain.training.config` checks their values. In the metadata of
a field, `rule` and `choices` say which values but None it may have, and `free` that the value may
differ when a run is resumed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from wdstrain.decode.crops import RATIO, SCALE
from wdstrain.runtime.options import option


class Rule(NamedTuple):
    """Which values an option may have, as a function and in words."""

    holds: Callable[[Any], bool]
    text: str


def _is_fold(text: str) -> bool:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    return match is not None and 1 <= int(match[1]) <= int(match[2]) >= 2


def _is_jitter(values: tuple[float, ...]) -> bool:
    in_range = all(0 <= value < math.inf for value in values) and max(values[3:], default=0) <= 0.5
    return len(values) in (0, 1, 3, 4) and in_range


def parse_numbers(value: Any) -> tuple[float, ...]:
    """Return numbers, or those of a text with commas between them. Raises ValueError for others."""
    given = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(map(float, given if isinstance(given, (list, tuple)) else [given]))
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a list of numbers; write for example 0.35,1") from None


def parse_size(value: Any) -> int | str:
    """Return the side of square images, else HEIGHTxWIDTH. Raises ValueError for another value."""
    given = re.split("[x,]", value) if isinstance(value, str) else value
    parts = [str(part) for part in (given if isinstance(given, (list, tuple)) else [given])]
    if len(parts) not in (1, 2) or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{value!r} is no size in pixels; write for example 64 or 192x256")
    height, width = int(parts[0]), int(parts[-1])
    return height if height == width else f"{height}x{width}"


AT_LEAST_0 = Rule(lambda value: value >= 0, ">= 0")
AT_LEAST_1 = Rule(lambda value: value >= 1, ">= 1")
FINITE = Rule(lambda value: 0 <= value < math.inf, "a finite number >= 0")
ABOVE_0 = Rule(lambda value: 0 < value < math.inf, "a finite number above 0")
BELOW_1 = Rule(lambda value: 0 <= value < 1, ">= 0 and below 1")
FACTOR = Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")
FOLD = Rule(_is_fold, "K/N with a part K in 1 to N and N >= 2, such as 1/5")
PROBABILITY = Rule(lambda value: 0 <= value <= 1, "in 0 to 1")
JITTER = Rule(_is_jitter, "1, 3 or 4 finite numbers >= 0, the fourth (hue) at most 0.5")
SEED = Rule(lambda value: 0 <= value < 2**63, ">= 0 and below 2**63")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """All options of a run that are plain values wherever they are given."""

    label: str | None = option(
        None,
        "labels to learn, as NAME or NAME:KIND with a comma between; KIND is class, binary, multi "
        "or number; or a field of masks, such as mask.png; for shards that declare no labels, the "
        "field or JSON entry that holds it, such as cls or json.kind (default: the only label)",
        metavar="NAME",
    )
    classes: str | None = option(
        None,
        "for such a field, names of its classes in the order of their numbers (default: sorted); "
        "of masks also their number alone",
        metavar="FILE|A,B,...",
    )
    where: str | None = option(
        None,
        "condition on the index's columns that samples for training and validation must meet, such "
        "as \"label != 'Other'\"",
        metavar="EXPR",
    )
    fold: str | None = option(
        None,
        "validate on part K of N equal parts of the training shards, 1 to N, and train on the "
        "others; every class has its share of each part",
        metavar="K/N",
        rule=FOLD,
    )
    balance: str | None = option(
        None,
        "column, such as label, each value of which gets the same number of samples per epoch",
        metavar="COLUMN",
    )
    limit_train_batches: int | None = option(
        None, "batches of each epoch of training (default: all)", metavar="N", rule=AT_LEAST_1
    )
    limit_val_batches: int | None = option(
        None, "batches of each validation (default: all)", metavar="N", rule=AT_LEAST_1, free=True
    )
    on_error: str = option(
        "raise",
        "sample that cannot be read: raise ends the run, replace takes another sample",
        choices=("raise", "replace"),
        free=True,
    )
    max_errors: float = option(
        0.01,
        "share of an epoch's samples that on_error=replace may replace; more ends the run",
        metavar="X",
        free=True,
        rule=PROBABILITY,
    )

    image_size: int | str = option(
        64,
        "width and height of the images in pixels, or HEIGHTxWIDTH, such as 192x256",
        metavar="N",
        parse=parse_size,
    )
    augment: str | None = option(
        None, "augmentation: rrc, flip, trivialaugment, randaugment, with + between", metavar="A"
    )
    scale: tuple[float, float] = option(
        SCALE,
        "least and largest area of a random resized crop, as shares of the image (default: 0.08,1)",
        metavar="LOW,HIGH",
        parse=parse_numbers,
    )
    ratio: tuple[float, float] = option(
        RATIO,
        "least and largest width / height of a random resized crop (default: 3/4 to 4/3)",
        metavar="LOW,HIGH",
        parse=parse_numbers,
    )
    crop_pct: float = option(
        1.0,
        "side of the center crop as a share of the image, such as 0.875; for validation, and for "
        "training without rrc",
        metavar="X",
        rule=FACTOR,
    )
    color_jitter: tuple[float, ...] = option(
        (),
        "largest change of brightness, contrast and saturation: one number, or three, or four with "
        "hue (at most 0.5); off if not given",
        metavar="X,...",
        parse=parse_numbers,
        rule=JITTER,
    )
    random_erasing: float = option(
        0.0, "probability that a rectangle of an image is erased", metavar="P", rule=PROBABILITY
    )
    mixup: float = option(0.0, "alpha of mixup; 0: off", metavar="X", rule=FINITE)
    cutmix: float = option(0.0, "alpha of CutMix; 0: off", metavar="X", rule=FINITE)
    mixup_prob: float = option(
        1.0, "probability that an image is mixed, by mixup or CutMix", metavar="P", rule=PROBABILITY
    )
    mixup_switch_prob: float = option(
        0.5, "probability of CutMix where both are on", metavar="P", rule=PROBABILITY
    )
    mixup_off_epoch: int | None = option(
        None,
        "mix no images after this many epochs (default: mix in all)",
        metavar="N",
        rule=AT_LEAST_1,
    )

    weights: str | None = option(
        None,
        "weights to start from: DEFAULT or another name of the model's weights in torchvision, "
        "DEFAULT for timm, or a file with a state dict or a checkpoint",
        metavar="NAME|FILE",
    )
    freeze: str | None = option(
        None,
        "parameters that are not trained: parts of names with a comma between, such as layer1, or "
        "backbone for all but the last layer",
        metavar="PATTERN",
    )
    unfreeze_epoch: int | None = option(
        None, "train the frozen parameters too after this many epochs", metavar="N", rule=AT_LEAST_0
    )

    epochs: int = option(
        10,
        "passes over the training data",
        metavar="N",
        free=True,
        rule=AT_LEAST_1,
    )
    batch_size: int = option(
        64, "images per step, of all processes together", metavar="N", rule=AT_LEAST_1
    )
    accumulate: int = option(
        1,
        "batches whose gradients are added up for one step of the optimizer",
        metavar="N",
        rule=AT_LEAST_1,
    )
    lr: float = option(2e-3, "peak learning rate", metavar="X", free=True, rule=ABOVE_0)
    min_lr: float = option(
        0.0, "lowest learning rate of the schedule", metavar="X", free=True, rule=FINITE
    )
    backbone_lr: float = option(
        1.0, "factor on the learning rate of all layers but the last", metavar="X", rule=FINITE
    )
    layer_decay: float = option(
        1.0,
        "factor on the learning rate from each block to the block before it",
        metavar="X",
        rule=FACTOR,
    )
    momentum: float = option(0.9, "momentum of sgd", metavar="X", rule=BELOW_1)
    weight_decay: float = option(
        0.05,
        "weight decay; norms, biases, class tokens and position embeddings have none",
        metavar="X",
        rule=FINITE,
    )
    schedule: str = option(
        "onecycle",
        "learning rate by step",
        choices=("onecycle", "cosine", "step", "plateau", "constant"),
    )
    warmup: float = option(
        0.0,
        "epochs in which the learning rate rises to its peak, before the schedule",
        metavar="X",
        rule=FINITE,
    )
    step_epochs: int | None = option(
        None,
        "epochs after which the schedule step divides the rate by 10 (default: a third of all)",
        metavar="N",
        rule=AT_LEAST_1,
    )
    plateau_epochs: int = option(
        3,
        "epochs without a better validation after which the schedule plateau divides the rate by 10",
        metavar="N",
        rule=AT_LEAST_1,
    )
    label_smoothing: float = option(
        0.0, "share of a label that is spread over all classes", metavar="X", rule=BELOW_1
    )
    class_weights: str = option(
        "none",
        "balanced: rare classes count as much as frequent ones",
        choices=("none", "balanced"),
    )
    clip_norm: float = option(
        0.0, "largest norm of the gradient; 0: no limit", metavar="X", rule=FINITE
    )
    clip_value: float = option(
        0.0, "largest absolute value in the gradient; 0: no limit", metavar="X", rule=FINITE
    )
    ema: float = option(
        0.0,
        "decay of a moving average of the weights, such as 0.999, which is validated beside them; "
        "0: off",
        metavar="X",
        rule=BELOW_1,
    )
    monitor: str | None = option(
        None,
        "metric of validation that chooses the best checkpoint (default: accuracy, mAP or mse; with "
        "several labels the loss); NAME:min or NAME:max says whether less or more is better",
        metavar="METRIC",
    )
    patience: int = option(
        0,
        "epochs without a better validation after which training ends; 0: never",
        metavar="N",
        free=True,
        rule=AT_LEAST_0,
    )
    min_delta: float = option(
        0.0, "least improvement of the metric that counts", metavar="X", free=True, rule=FINITE
    )
    seed: int = option(0, "seed of order, augmentation and initial weights", metavar="N", rule=SEED)
    deterministic: bool = option(
        False, "the same bits in every run on the same machine; slower on a GPU", negatable=True
    )

    device: str = option("auto", "cpu, cuda or auto", free=True)
    amp: str = option("none", "16-bit arithmetic", choices=("none", "bf16", "fp16"))
    tf32: bool = option(
        False, "TensorFloat-32 for matrix products on CUDA", free=True, negatable=True
    )
    channels_last: bool = option(
        False, "channels last memory format, faster on GPUs", free=True, negatable=True
    )
    fsdp: bool = option(
        False,
        "split the model and its optimizer over the processes (FSDP2), for models that do not fit "
        "on one GPU",
        free=True,
        negatable=True,
    )
    sync_batchnorm: bool = option(
        False,
        "batch norms over the batches of all processes, for small batches per process",
        negatable=True,
    )
    compile: bool = option(False, "torch.compile the model", free=True, negatable=True)
    grad_checkpointing: bool = option(
        False,
        "keep only the inputs of the model's blocks, and compute the blocks again for the gradient: "
        "less memory, about a third slower, the same results",
        free=True,
        negatable=True,
    )
    num_workers: int = option(
        0, "decoding processes; 0: threads", metavar="N", free=True, rule=AT_LEAST_0
    )
    lanes: int | None = option(
        None,
        "forward runs through the shards; set it to resume with another number of processes "
        "(default: one per process)",
        metavar="N",
        rule=AT_LEAST_1,
    )
    shuffle_buffer: int | None = option(
        None,
        "samples that a sample may be delivered after it was read (default: 256 MB of samples)",
        metavar="N",
        rule=AT_LEAST_1,
    )
    cache_dir: str | None = option(
        None, "folder that keeps remote shards (default: no cache)", metavar="DIR", free=True
    )
    cache_limit: str | None = option(
        None, "most bytes in it, such as 200GB (default: no limit)", metavar="SIZE", free=True
    )

    checkpoint_every: int = option(
        0,
        "steps between checkpoints; 0: only at the end of epochs",
        metavar="STEPS",
        free=True,
        rule=AT_LEAST_0,
    )
    checkpoint_minutes: float = option(
        10.0,
        "minutes between checkpoints; 0: not by the clock",
        metavar="X",
        free=True,
        rule=FINITE,
    )
    keep: int = option(
        2,
        "latest checkpoints that are kept, beside the best",
        metavar="N",
        free=True,
        rule=AT_LEAST_1,
    )


# Groups of options in help texts, each with its first option.
_FIRST = {
    "data": "label",
    "images and augmentation": "image_size",
    "weights": "weights",
    "optimization": "epochs",
    "machine": "device",
    "checkpoints": "checkpoint_every",
}
_NAMES = list(RunOptions.__dataclass_fields__)
_STARTS = [*map(_NAMES.index, _FIRST.values()), len(_NAMES)]
GROUPS = {
    title: _NAMES[first:end] for title, (first, end) in zip(_FIRST, pairwise(_STARTS), strict=True)
}
