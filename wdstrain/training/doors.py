"""What is called from Python and from the shell: train, evaluate. They put the parts of a run together, and take them apart again.

Everything that can be wrong is found before the folder of the run is touched: addresses, labels, classes, options, the model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wdstrain.decode.fields import Example, Field
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.loader.loader import Loader
from wdstrain.shards.declare import read_classes, with_label
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import open_index, require_one_split
from wdstrain.storage.addresses import Urls
from wdstrain.storage.remote import is_remote, redacted
from wdstrain.training.checkpoints import read_last
from wdstrain.training.configuration import OF_EVALUATING, Config
from wdstrain.training.counting import class_weights, scaled
from wdstrain.training.interruption import Interruption
from wdstrain.training.keeping import Keeper
from wdstrain.training.loop import Training
from wdstrain.training.models import Maker, begin_with, build, freeze, made_by, try_out
from wdstrain.training.opened import Opened
from wdstrain.training.run import CHECKPOINTS, Run
from wdstrain.training.scoring import score
from wdstrain.training.task import Task, check_picture, picture_of, picture_state, shape_of
from wdstrain.training.telling import Tell, told
from wdstrain.training.world import World, device_of


@dataclass
class Outcome:
    """What a run came to. `epochs`: the metrics of each; `best`: those of validation at its best; `model`: as it is at the end."""

    folder: str
    task: Task
    model: nn.Module
    epochs: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, float] | None = None

    @property
    def val(self) -> dict[str, float]:
        """Metrics of validation at the end."""
        return self.epochs[-1].get("val", {}) if self.epochs else {}

    def __repr__(self) -> str:
        last = {name: round(value, 4) for name, value in self.val.items()}
        return f"Outcome({self.folder!r}, {len(self.epochs)} epochs, val={last})"


@WorkerDeathsAsErrors()
def train(
    urls: Urls | Index,
    out: str | os.PathLike[str],
    *,
    val: Urls | Index | None = None,
    model: str | Maker | nn.Module = "small",
    image: Field | None = None,
    resume: bool = False,
    overwrite: bool = False,
    tell: Tell | None = None,
    **options: Any,
) -> Outcome:
    """Train a model on the shards of `urls`, validate it on `val` after each epoch, and keep the run in the folder `out`.

    urls       of the training shards, or an Index; one that holds the splits train and val serves for both
    model      small, a torchvision model by name, module:function, a function that makes a model of so many outputs, or a
               torch.nn.Module, of which a copy is trained
    image      what becomes of the pictures, instead of wt.image(size=image_size, augment=augment). Validation uses it too.
               uint8 of three channels is normalised as ImageNet is, other uint8 is divided by 255; other numbers become
               float32 and are not normalised
    resume     go on from the last checkpoint in `out`; start if there is none. On a processor, with deterministic=True, the
               weights come to the same bits as those of a run that was never stopped
    overwrite  replace an earlier run in `out`
    tell       who is told how it goes on: an object with step(title, done, total, text, unit) and line(text);
               default: stderr, or the notebook
    options    those of `wdstrain train --help`, with _ for -: epochs, batch_size, lr, label, augment, ...

    Under torchrun every process calls this, and all share each batch; the first writes. Raises UsageError and ShardError before
    anything is written where shards, labels and options do not fit, and Stopped after a signal, with a checkpoint written.
    """
    maker, name = (None, model) if isinstance(model, str) else (model, _name_of(model))
    config, folder, world = (
        _from_anywhere(Config.of({**options, "model": name})),
        os.fspath(out),
        World(),
    )
    if resume and overwrite:
        raise UsageError(
            "resume goes on with what is in the folder, and overwrite takes it away. Give one of them."
        )
    train_index, val_index = sources(urls, val)
    asked = config.label
    if not train_index.labels and not train_index.shard_labels and asked is not None:
        train_index, val_index = _declared(train_index, val_index, asked, config.classes)
        asked = train_index.labels[0].name
    elif config.classes is not None:
        raise UsageError(
            "classes name those of a label that no index declares. Leave them away, or name a field "
            "with label in shards whose index has no labels."
        )
    if config.where is not None:
        train_index = train_index.where(config.where)
        val_index = val_index.where(config.where) if val_index is not None else None
    state, refused = read_last(os.path.join(folder, CHECKPOINTS)) if resume else (None, [])
    task = _task(train_index, asked, state)
    if val_index is not None:
        task.check(val_index)
    elif config.patience:
        raise UsageError(
            f"patience={config.patience} looks at validation, and there is none. Give --val."
        )
    device = device_of(config.device, world)
    torch.manual_seed(config.seed)
    picture, seen = (
        image or picture_of(config.image_size, config.augment),
        image or picture_of(config.image_size),
    )
    example = check_picture(
        picture, channels_last=config.channels_last, mixes=bool(config.mixup or config.cutmix)
    )
    made = _model(config, task, maker, example)
    fresh = begin_with(made, config.weights) if config.weights and state is None else []
    if config.freeze:
        freeze(made)
    lanes = config.lanes or (
        state["loader"]["lanes"] if state is not None else None
    )  # those it began with
    loader = _loader(train_index, task, picture, config, world, lanes)
    val_loader = (
        _val_loader(val_index, task, seen, config, world) if val_index is not None else None
    )
    with ExitStack() as stack:
        speaker = stack.enter_context(told(tell, world.leads))
        stack.callback(loader.close)
        if val_loader is not None:
            stack.callback(val_loader.close)
        stack.enter_context(_determinism(config, device))
        stack.enter_context(world.joined(device))
        same = (
            state["position"] if state is not None else None,
            train_index.fingerprint,
            vars(config),
        )
        if any(other != same for other in world.gather(same)):
            raise UsageError(
                f"rank {world.rank} of {world.size}: the processes of this job see different checkpoints in {folder}, other shards or other "
                f"options. Give all of them the same, and a folder that all of them share."
            )
        interruption = stack.enter_context(Interruption().watched())
        stack.enter_context(
            world.explained()
        )  # inside of the watch: between the two, a signal could end what is to be said
        made = (
            made.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            if config.channels_last
            else made.to(device)
        )
        weights = [
            class_weights(train_index, head, config.class_weights, device) for head in task.heads
        ]
        keeper = Keeper(task)
        training = Training(
            made,
            task,
            loader,
            val_loader,
            config,
            world=world,
            device=device,
            weights=weights,
            picture=picture_state(seen, example),
            keep=keeper,
            tell=speaker,
        )
        if fresh:
            speaker.line(f"weights of {config.weights}; begun anew: {', '.join(fresh)}")
        if state is not None:
            for why in refused:
                speaker.line(f"{why} The one before it is taken.")
            training.load(state)
            at = training.at
            speaker.line(f"going on from epoch {at.epoch + 1}, step {at.step} of {len(loader)}")
        if world.leads:
            run = Run(folder, config.toml(_data(urls, val)), overwrite=overwrite, resume=resume)
            stack.callback(run.close)
            stack.callback(keeper.close)
            indexes = {
                "train": train_index,
                **({"val": val_index} if val_index is not None else {}),
            }
            keeper.begin(run, config, training.at, indexes, len(loader))
        training.fit(interruption)
    return Outcome(folder, task, training.scored, training.at.history, training.at.best)


@WorkerDeathsAsErrors()
def evaluate(
    checkpoint: str | os.PathLike[str],
    urls: Urls | Index,
    *,
    model: Maker | nn.Module | str | None = None,
    image: Field | None = None,
    tell: Tell | None = None,
    **options: Any,
) -> tuple[Task, dict[str, float]]:
    """(task, metrics) of a checkpoint on the shards of `urls`; every sample counts once, also where torchrun started several processes.

    model, image: as they were given to `train`; a module:function that the checkpoint names is not imported unless it is named
    here, and fields of wt are those of the checkpoint. options: batch_size, num_workers, device, amp, on_bad, cache_dir,
    cache_limit; others are refused, because the checkpoint says them.
    """
    world = World()
    opened = Opened.of(checkpoint, model=model, options=options, known=OF_EVALUATING)
    field = opened.field(image)
    index = _opened(urls)
    opened.task.check(index)
    config, task, device = opened.config, opened.task, device_of(opened.config.device, world)
    loader = _val_loader(index, task, field, config, world)
    with ExitStack() as stack:
        speaker = stack.enter_context(told(tell, world.leads))
        stack.callback(loader.close)
        stack.enter_context(world.joined(device))
        metrics, _ = score(
            opened.model.to(device), loader, task, config, device, world, "evaluating", speaker
        )
    return task, metrics


def sources(urls: Urls | Index, val: Urls | Index | None) -> tuple[Index, Index | None]:
    """Return the samples to train on and those to validate on."""
    index = urls if isinstance(urls, Index) else open_index(urls)
    if val is None and {"train", "val"} <= set(index.splits):
        numbers = {
            split: [i for i, shard in enumerate(index.shards) if shard.split == split]
            for split in index.splits
        }
        return index.pick(numbers["train"]), index.pick(numbers["val"])
    train = index if isinstance(urls, Index) else require_one_split(index, urls)
    return train, _opened(val) if val is not None else None


def _declared(
    train: Index, val: Index | None, name: str, classes: str | None
) -> tuple[Index, Index | None]:
    """Return both sets with a label that is read from a field or an entry, in one pass over each."""
    train = with_label(train, name, None if classes is None else read_classes(classes))
    if val is not None and not val.labels and not val.shard_labels:
        val = with_label(val, name, train.labels[0].classes or None)
    return train, val


def _opened(urls: Urls | Index) -> Index:
    return urls if isinstance(urls, Index) else require_one_split(open_index(urls), urls)


# --- parts -----------------------------------------------------------------------------------------------------------


def _task(index: Index, asked: str | None, state: Mapping[str, Any] | None) -> Task:
    """What is learnt. A run that goes on has the scale of its numbers, which of shards elsewhere may be taken from other samples."""
    task = Task.of(index, asked)
    former = Task.from_state(state["task"]) if state is not None else None
    return former if former is not None and former.is_as(task) else scaled(task, index)


def _from_anywhere(config: Config) -> Config:
    """The configuration with paths from the root, so that a run goes on from any folder."""
    paths = {name: getattr(config, name) for name in ("cache_dir", "weights")}
    return replace(
        config, **{name: os.path.abspath(path) for name, path in paths.items() if path is not None}
    )


def _model(
    config: Config, task: Task, maker: Maker | nn.Module | None, example: Example
) -> nn.Module:
    made = (
        made_by(maker, config.model, task.outputs)
        if maker is not None
        else build(config.model, task.outputs, config.image_size)
    )
    return try_out(made, config.model, shape_of(example), task.outputs)


def _loader(
    index: Index, task: Task, picture: Field, config: Config, world: World, lanes: int | None
) -> Loader:
    return Loader(
        index,
        task.fields(picture),
        seed=config.seed,
        shuffle_buffer=config.shuffle_buffer,
        balance=config.balance,
        lanes=lanes,
        **_own(config, world),
    )


def _val_loader(index: Index, task: Task, picture: Field, config: Config, world: World) -> Loader:
    return Loader(index, task.fields(picture), shuffle=False, tail="keep", **_own(config, world))


def _own(config: Config, world: World) -> dict[str, Any]:
    """What both loaders have. A batch is of all processes together."""
    if config.batch_size % world.size:
        raise UsageError(
            f"batch_size={config.batch_size} cannot be shared by {world.size} processes. Use a multiple of {world.size}."
        )
    return {
        "batch_size": config.batch_size // world.size,
        "num_workers": config.num_workers,
        "rank": world.rank,
        "world_size": world.size,
        "on_bad": config.on_bad,
        "cache_dir": config.cache_dir,
        "cache_limit": config.cache_limit,
    }


def _determinism(config: Config, device: torch.device) -> ExitStack:
    """Deterministic arithmetic for as long as the run takes."""
    stack = ExitStack()
    if config.deterministic:
        if device.type == "cuda":
            os.environ.setdefault(
                "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
            )  # cuBLAS reads it when it is first used
        was, tuned = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        stack.callback(torch.use_deterministic_algorithms, was)
        stack.callback(setattr, torch.backends.cudnn, "benchmark", tuned)
    return stack


def _data(urls: Urls | Index, val: Urls | Index | None) -> dict[str, Any]:
    """Addresses as config.toml keeps them: those of this machine from its root, so that a run goes on from any folder."""
    return {"train": _plain(urls), "val": _plain(val) if val is not None else None}


def _plain(urls: Urls | Index) -> str | list[str]:
    if isinstance(urls, Index):
        return [str(_plain(shard.path)) for shard in urls.shards]
    if isinstance(urls, (str, os.PathLike)):
        scheme, separator, rest = os.fspath(urls).partition("://")
        text = f"{scheme.lower()}://{rest}" if separator else scheme
        return (
            redacted(text) if is_remote(text) else text if "://" in text else os.path.abspath(text)
        )
    return [str(_plain(one)) for one in urls]


def _name_of(maker: Callable[..., Any]) -> str:
    """module:function where it can be found by that again, else a name that cannot."""
    module, name = (
        getattr(maker, "__module__", None),
        getattr(maker, "__qualname__", type(maker).__name__),
    )
    is_there = module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is maker
    return f"{module}:{name}" if is_there else f"<{name.strip('<>')}>"
