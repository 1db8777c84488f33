"""Options of a training run, by purpose.

Each is declared once: it is a flag, a key of a file of options, a keyword argument of `wt.train`,
and a line of a run's config.toml. `wdstrain.training.config` checks their values. In the metadata of
a field, `rule` (of LIMITS) and `choices` say which values but None it may have, and `free` that the
value may differ when a run is resumed.
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from wdstrain.decode.crops import RATIO, SCALE
from wdstrain.runtime.options import option


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


def parse_jitter(value: Any) -> tuple[float, ...]:
    """Return the strengths of color jitter. Raises ValueError for others."""
    numbers = parse_numbers(value)
    in_range = all(0 <= n < math.inf for n in numbers) and max(numbers[3:], default=0) <= 0.5
    if len(numbers) not in (0, 1, 3, 4) or not in_range:
        raise ValueError("must be 1, 3 or 4 finite numbers >= 0, the fourth (hue) at most 0.5")
    return numbers


def parse_fold(value: Any) -> str:
    """Return a part of a number of folds, such as 1/5. Raises ValueError for others."""
    match = re.fullmatch(r"(\d+)/(\d+)", str(value))
    if match is None or not 1 <= int(match[1]) <= int(match[2]) >= 2:
        raise ValueError(f"{value} must be K/N with a part K in 1 to N and N >= 2, such as 1/5")
    return match.string


def parse_classes(value: Any) -> str:
    """Return names of classes, or their number, as text. Raises ValueError for names with a comma."""
    if isinstance(value, str):
        return value
    names = [str(name) for name in (value if isinstance(value, (list, tuple)) else [value])]
    if any("," in name for name in names):
        raise ValueError("a name holds a comma; give a file with a name on each line")
    return ",".join(names)


def parse_weights(value: Any) -> str:
    """Return the name of weights, or an absolute path: a run is resumed from any folder."""
    text = str(value)
    return os.path.abspath(text) if is_file(text) else text


def is_file(weights: str) -> bool:
    """Return whether weights name a file, and not a member of an enumeration such as DEFAULT."""
    return os.path.exists(weights) or os.sep in weights or weights.endswith(_FILE_SUFFIXES)


# ends of names of files of weights
_FILE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".safetensors")

# Least and greatest number of an option, by its rule.
LIMITS = {
    ">= 0": (0, math.inf),
    ">= 1": (1, math.inf),
    "a finite number >= 0": (0, sys.float_info.max),
    "a finite number above 0": (math.ulp(0), sys.float_info.max),
    ">= 0 and below 1": (0, math.nextafter(1, 0)),
    "above 0 and at most 1": (math.ulp(0), 1),
    "in 0 to 1": (0, 1),
    ">= 0 and below 2**63": (0, 2**63 - 1),
}


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
        "classes of the label to learn, in this order (default: all); for a field without a declared "
        "label, the names of its classes in the order of their numbers (default: sorted); of masks "
        "also their number alone",
        metavar="FILE|A,B,...",
        parse=parse_classes,
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
        parse=parse_fold,
    )
    balance: str | None = option(
        None,
        "column, such as label, each value of which gets the same number of samples per epoch",
        metavar="COLUMN",
    )
    limit_train_batches: int | None = option(
        None, "batches of each epoch of training (default: all)", metavar="N", rule=">= 1"
    )
    limit_val_batches: int | None = option(
        None, "batches of each validation (default: all)", metavar="N", rule=">= 1", free=True
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
        rule="in 0 to 1",
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
        rule="above 0 and at most 1",
    )
    color_jitter: tuple[float, ...] = option(
        (),
        "largest change of brightness, contrast and saturation: one number, or three, or four with "
        "hue (at most 0.5); off if not given",
        metavar="X,...",
        parse=parse_jitter,
    )
    random_erasing: float = option(
        0.0, "probability that a rectangle of an image is erased", metavar="P", rule="in 0 to 1"
    )
    mixup: float = option(0.0, "alpha of mixup; 0: off", metavar="X", rule="a finite number >= 0")
    cutmix: float = option(0.0, "alpha of CutMix; 0: off", metavar="X", rule="a finite number >= 0")
    mixup_prob: float = option(
        1.0, "probability that an image is mixed, by mixup or CutMix", metavar="P", rule="in 0 to 1"
    )
    mixup_switch_prob: float = option(
        0.5, "probability of CutMix where both are on", metavar="P", rule="in 0 to 1"
    )
    mixup_off_epoch: int | None = option(
        None, "mix no images after this many epochs (default: mix in all)", metavar="N", rule=">= 1"
    )

    weights: str | None = option(
        None,
        "weights to start from: DEFAULT or another name of the model's weights in torchvision, "
        "DEFAULT for timm, or a file with a state dict or a checkpoint",
        metavar="NAME|FILE",
        parse=parse_weights,
    )
    freeze: str | None = option(
        None,
        "parameters that are not trained: parts of names with a comma between, such as layer1, or "
        "backbone for all but the last layer",
        metavar="PATTERN",
    )
    unfreeze_epoch: int | None = option(
        None, "train the frozen parameters too after this many epochs", metavar="N", rule=">= 0"
    )

    epochs: int = option(10, "passes over the training data", metavar="N", free=True, rule=">= 1")
    batch_size: int = option(
        64, "images per step, of all processes together", metavar="N", rule=">= 1"
    )
    accumulate: int = option(
        1,
        "batches whose gradients are added up for one step of the optimizer",
        metavar="N",
        rule=">= 1",
    )
    lr: float = option(
        2e-3, "peak learning rate", metavar="X", free=True, rule="a finite number above 0"
    )
    min_lr: float = option(
        0.0,
        "lowest learning rate of the schedule",
        metavar="X",
        free=True,
        rule="a finite number >= 0",
    )
    backbone_lr: float = option(
        1.0,
        "factor on the learning rate of all layers but the last",
        metavar="X",
        rule="a finite number >= 0",
    )
    layer_decay: float = option(
        1.0,
        "factor on the learning rate from each layer of a model of timm to the layer before it",
        metavar="X",
        rule="above 0 and at most 1",
    )
    momentum: float = option(0.9, "momentum of sgd", metavar="X", rule=">= 0 and below 1")
    weight_decay: float = option(
        0.05,
        "weight decay; norms, biases, class tokens and position embeddings have none",
        metavar="X",
        rule="a finite number >= 0",
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
        rule="a finite number >= 0",
    )
    step_epochs: int | None = option(
        None,
        "epochs after which the schedule step divides the rate by 10 (default: a third of all)",
        metavar="N",
        rule=">= 1",
    )
    plateau_epochs: int = option(
        3,
        "epochs without a better validation after which the schedule plateau divides the rate by 10",
        metavar="N",
        rule=">= 1",
    )
    label_smoothing: float = option(
        0.0,
        "share of a label that is spread over all classes",
        metavar="X",
        rule=">= 0 and below 1",
    )
    class_weights: str = option(
        "none",
        "balanced: rare classes count as much as frequent ones",
        choices=("none", "balanced"),
    )
    clip_norm: float = option(
        0.0, "largest norm of the gradient; 0: no limit", metavar="X", rule="a finite number >= 0"
    )
    clip_value: float = option(
        0.0,
        "largest absolute value in the gradient; 0: no limit",
        metavar="X",
        rule="a finite number >= 0",
    )
    ema: float = option(
        0.0,
        "decay of a moving average of the weights, such as 0.999, which is validated beside them; "
        "0: off",
        metavar="X",
        rule=">= 0 and below 1",
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
        rule=">= 0",
    )
    min_delta: float = option(
        0.0,
        "least improvement of the metric that counts",
        metavar="X",
        free=True,
        rule="a finite number >= 0",
    )
    seed: int = option(
        0,
        "seed of order, augmentation and initial weights",
        metavar="N",
        rule=">= 0 and below 2**63",
    )
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
        "gradient checkpointing of the model's own, such as a model of timm has: less memory, about "
        "a third slower",
        free=True,
        negatable=True,
    )
    num_workers: int = option(
        0, "decoding processes; 0: threads", metavar="N", free=True, rule=">= 0"
    )
    lanes: int | None = option(
        None,
        "forward runs through the shards; set it to resume with another number of processes "
        "(default: one per process)",
        metavar="N",
        rule=">= 1",
    )
    shuffle_buffer: int | None = option(
        None,
        "samples that a sample may be delivered after it was read (default: 256 MB of samples)",
        metavar="N",
        rule=">= 1",
    )
    cache_dir: str | None = option(
        None,
        "folder that keeps remote shards (default: no cache)",
        metavar="DIR",
        free=True,
        parse=os.path.abspath,
    )
    cache_limit: str | None = option(
        None, "most bytes in it, such as 200GB (default: no limit)", metavar="SIZE", free=True
    )

    checkpoint_every: int = option(
        0,
        "steps between checkpoints; 0: only at the end of epochs",
        metavar="STEPS",
        free=True,
        rule=">= 0",
    )
    checkpoint_minutes: float = option(
        10.0,
        "minutes between checkpoints; 0: not by the clock",
        metavar="X",
        free=True,
        rule="a finite number >= 0",
    )
    keep: int = option(
        2, "latest checkpoints that are kept, beside the best", metavar="N", free=True, rule=">= 1"
    )
    record: bool = option(
        False,
        "write recorded.parquet in each epoch: for each training sample its loss as it is trained, "
        "how often it was shown, and for a single label of classes whether it was predicted right "
        "(a table for join). The report shows the hardest samples",
        free=True,
        negatable=True,
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
