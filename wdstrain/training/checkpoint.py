"""Weights to start from, checkpoints of a run, and trained models.

`load` takes torchvision's weights by name, timm's, or a file: a state dict, a checkpoint of a run,
or one of another trainer. A classifier of another shape is initialized at random, and is named.
`Setup` says how a model is called and scored; `load_checkpoint` returns it for a trained one.
"""

from __future__ import annotations

import argparse
import errno
import fnmatch
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from wdstrain.decode.fields import Field
from wdstrain.decode.worker_processes import WorkerDeathsAsErrors
from wdstrain.errors import UsageError
from wdstrain.report.terminal import Reporter
from wdstrain.shards.index import Index
from wdstrain.storage.files import disk_errors, put_whole
from wdstrain.training.config import Config, is_made, refuse, refusing
from wdstrain.training.distributed import DistributedContext, device_of
from wdstrain.training.heads import Criterion, TrainingStep
from wdstrain.training.inputs import (
    Fields,
    ModelInputs,
    Normalization,
    check_same_inputs,
    input_fields,
)
from wdstrain.training.models import TIMM, ModelFactory, build, output_layers
from wdstrain.training.options import is_file
from wdstrain.training.tasks import Task

CHECKPOINTS = "checkpoints"  # in the folder of a run
LAST, BEST = "last.pt", "best.pt"
_INTACT = "Earlier checkpoints are intact."
FORMAT = 3  # of the contents of a checkpoint
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.")  # DataParallel, torch.compile, Lightning
# Keys of checkpoints under which a state dict lies.
_NESTED = ("model", "state_dict", "model_state_dict", "net")
# Heads of torchvision's Inception and segmentation models for a second loss.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.", "aux_classifier.")


# Parameters that were not in the weights, and the normalization that the weights expect.
Loaded = tuple[tuple[str, ...], Normalization | None]


def load(
    model: nn.Module, model_name: str, weights: str, classes: Sequence[Sequence[str]] = ()
) -> Loaded:
    """Load weights into a model; return its parameters that they lack, and their normalization.

    weights: a file, or for a model of torchvision the name of its weights, such as DEFAULT or
    IMAGENET1K_V2, and for a model of timm DEFAULT, which `models.build(pretrained=True)` has loaded.
    classes: of each label that is learned. The last layer of a run that learned others starts anew.
    Raises UsageError for weights that are missing, or of another model, naming the differences.
    """
    if is_file(weights):
        return _load_file(model, weights, classes)
    if not model_name.startswith(TIMM):
        return _load_torchvision(model, model_name, weights)
    refuse(
        weights != "DEFAULT",
        "{weights}: timm's weights are DEFAULT.",
        "Name others in the model, as in timm:vit_small_patch16_224.augreg_in1k.",
        weights=weights,
    )
    config = cast(Any, model).pretrained_cfg
    return (), (tuple(config["mean"]), tuple(config["std"]))


def _load_torchvision(model: nn.Module, model_name: str, weights: str) -> Loaded:
    from torchvision.models import get_model_weights

    has_names = model_name != "small" and ":" not in model_name
    members: Any = get_model_weights(model_name).__members__ if has_names else {}
    refuse(
        weights not in members,
        f"{{weights}}: {model_name} has no such weights and no such file exists.",
        f"Use one of: {', '.join(members)}, or a file." if members else "Give a file of weights.",
        weights=weights,
    )
    member = members[weights]
    with refusing(
        f"{{weights}} of {model_name} cannot be downloaded",
        f"Download {member.url} elsewhere, and put it into {torch.hub.get_dir()}/checkpoints or "
        "give its file as weights.",
        errors=(OSError, RuntimeError),
        weights=weights,
    ):
        state = member.get_state_dict(progress=False, check_hash=True)
    transforms = member.transforms()
    normalization = tuple(transforms.mean), tuple(transforms.std)
    return _copy_weights(model, state, weights), normalization


def _load_file(model: nn.Module, path: str, classes: Sequence[Sequence[str]]) -> Loaded:
    # timm and torchvision's references save their arguments beside the weights
    with torch.serialization.safe_globals([argparse.Namespace]):
        value: Any = _read_file(
            path,
            "cannot be loaded by torch.load with weights_only=True. Save a state dict: "
            "torch.save(model.state_dict(), FILE).",
        )
    normalization, is_other = None, False
    if isinstance(value, Mapping) and value.get("format") == FORMAT:  # a checkpoint of a run
        normalization = ModelInputs.from_state(value["inputs"]).normalization
        learned = [head.classes for head in Task.from_state(value["task"]).heads]
        is_other = bool(classes) and learned != list(classes)
    for name in _NESTED:
        if isinstance(value, Mapping) and isinstance(value.get(name), Mapping):
            value = value[name]
    is_state = isinstance(value, Mapping) and all(isinstance(t, Tensor) for t in value.values())
    refuse(not is_state, "{weights} holds no state dict of names and tensors.", weights=path)
    return _copy_weights(model, value, path, is_other), normalization


def _copy_weights(
    model: nn.Module, state: Mapping[str, Tensor], source: str, is_other: bool = False
) -> tuple[str, ...]:
    """Copy weights, but for a last layer of another shape; return the names that stay fresh.

    is_other: the weights are of other classes, so the last layer stays fresh.
    """
    wanted, last = model.state_dict(), output_layers(model)
    names = list(state)
    for prefix in 2 * _PREFIXES:  # of wrappers, in any order
        is_own = any(name.startswith(prefix) for name in wanted)
        if not is_own and all(name.startswith(prefix) for name in names):
            names = [name.removeprefix(prefix) for name in names]
    given = {
        name: value
        for name, value in zip(names, state.values(), strict=True)
        if name in wanted or not name.startswith((*last, *_AUXILIARY))
    }
    fresh = {
        name: value
        for name, value in wanted.items()
        if name.startswith(last)
        and (is_other or name not in given or given[name].shape != value.shape)
    }
    with refusing(f"the weights {source} are of another model", "Give the model that they are of."):
        model.load_state_dict({**given, **fresh})
    return tuple(fresh)


def freeze(model: nn.Module, patterns: str) -> list[str]:
    """Freeze parameters, and return the names of those that were trained until now.

    patterns: parts of names with a comma between them: `layer1` for all of layer1, `*.bn?.*`, or
    `backbone` for all but the last layer. Raises UsageError for a pattern that matches nothing, and
    if nothing is left to train.
    """
    names, frozen = [name for name, _ in model.named_parameters()], set[str]()
    for pattern in (part.strip() for part in patterns.split(",")):
        matching = [*fnmatch.filter(names, pattern), *fnmatch.filter(names, f"{pattern}.*")]
        if pattern == "backbone":
            matching = [name for name in names if not name.startswith(output_layers(model))]
        refuse(
            not matching,
            "{freeze} matches no parameter.",
            f"Names are such as {', '.join(names[:4])}.",
            freeze=pattern,
        )
        frozen.update(matching)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    refuse(trained <= frozen, "{freeze} leaves no parameter to train.", freeze=patterns)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return sorted(frozen & trained)


def train_mode(model: nn.Module) -> None:
    """Set the training mode. Frozen modules keep the means and variances of their batch norms."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            for part in module.modules():
                if [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
                    part.training = False


# --- files of checkpoints -------------------------------------------------------------------------
# A checkpoint is written under a hidden name, flushed and renamed. `last.pt` and `best.pt` are links
# to such files, and change atomically too. So a kill at any moment leaves the former checkpoint, and
# at most a hidden file, which the next run removes. Checkpoints hold plain values and tensors only.


def _read_file(path: str, other: str) -> Any:
    """Return what torch.save wrote, on the CPU. other: sentence on a file that is none.

    Raises UsageError for a missing or damaged file, also for changed bytes, which torch does not
    notice.
    """
    with refusing(f"{path} cannot be read", "Check the path.", errors=(OSError,)):
        try:
            # torch has its own words for other files
            with suppress(zipfile.BadZipFile, NotImplementedError), zipfile.ZipFile(path) as file:
                damaged = file.testzip()
                refuse(
                    damaged is not None,
                    f"{path} is damaged: the checksum of {damaged} differs.",
                    "Use another file.",
                )
            return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
            raise UsageError(f"{path} {other}") from error


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return a checkpoint as it was saved. Raises UsageError for another or a missing file."""
    state = _read_file(path, "is no checkpoint of a run. Name one such as RUN/checkpoints/best.pt")
    parts: dict[str, Any] = state if isinstance(state, dict) else {}
    refuse(
        not {"model", "config", "task"} <= set(parts),
        f"{path} is a checkpoint of another program: it lacks model, config or task.",
    )
    refuse(
        parts.get("format") != FORMAT,
        f"{path} has the checkpoint format {parts.get('format')}: must be {FORMAT}.",
        "Read it with the version of wdstrain that wrote it.",
    )
    return parts


def write_checkpoint(
    folder: str, state: Mapping[str, Any], step: int, *, keep: int, best: bool = False
) -> str:
    """Write a checkpoint of this step of a run, and return its path.

    keep: latest checkpoints that stay, beside the best. best: it is the best.
    """
    name = f"step-{step:08d}.pt"
    path = os.path.join(folder, name)
    # best.pt first: a run resumed from this step does not write it again
    first, *others = (BEST, name, LAST) if best else (name, LAST)
    with put_whole(os.path.join(folder, first), _INTACT) as file:
        try:
            with WorkerDeathsAsErrors():
                torch.save(dict(state), file.name)
        except RuntimeError as error:  # of torch on a full disk
            raise OSError(errno.EIO, str(error).splitlines()[0]) from error
    for other in others:
        _link(os.path.join(folder, first), os.path.join(folder, other))
    with disk_errors(path, _INTACT):
        for old in set(names(folder)[:-keep]) - {name}:
            os.unlink(os.path.join(folder, old))
    return path


def _link(path: str, other: str) -> None:
    """Give a file another name, which replaces an earlier file of that name."""
    with put_whole(other, _INTACT) as file:
        os.unlink(file.name)  # a link needs the name, not the empty file
        try:
            os.link(path, file.name)
        except OSError:  # a file system without links
            shutil.copyfile(path, file.name)


def names(folder: str) -> list[str]:
    """Return the names of a folder's checkpoints by step, the oldest first."""
    return sorted(path.name for path in Path(folder).glob("step-*.pt"))


def read_last(folder: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Return (last readable checkpoint of a folder or None, why later ones cannot be read).

    Raises UsageError if there are checkpoints, and none can be read.
    """
    refused: list[str] = []
    paths = [os.path.join(folder, name) for name in (LAST, *reversed(names(folder)))]
    for path in filter(os.path.exists, paths):
        try:
            return read_checkpoint(path), refused
        except UsageError as error:
            refused.append(str(error))
    if refused:
        raise UsageError(f"no checkpoint in {folder} can be read: {refused[0]}")
    return None, refused


# --- a trained model ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a model is called and scored: what training and the use of a checkpoint share.

    criterion: of the user's, in place of the heads' losses; for each head by name, if there are
    several. training_step: of the user's, in place of the call of the model and its losses.
    metrics: torchmetrics by name. path: of the checkpoint that was loaded.
    """

    task: Task
    config: Config
    inputs: ModelInputs
    distributed: DistributedContext = field(default_factory=DistributedContext)
    reporter: Reporter = field(default_factory=Reporter)
    criterion: Criterion | Mapping[str, Criterion] | None = None
    training_step: TrainingStep | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""

    @cached_property
    def device(self) -> torch.device:
        """The device of this process. Raises UsageError if the machine has no such device."""
        return device_of(self.config.device, self.distributed)

    @cached_property
    def criterion_modules(self) -> nn.ModuleList:
        """Criteria and training step of the user's that are modules, with parameters and buffers."""
        own = self.criterion
        given = [*(own.values() if isinstance(own, Mapping) else [own]), self.training_step]
        return nn.ModuleList(one for one in given if isinstance(one, nn.Module)).to(self.device)

    def autocast(self) -> torch.autocast:
        """Return the context of 16-bit arithmetic, if the run has it."""
        dtype = torch.bfloat16 if self.config.amp == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype, enabled=self.config.amp != "none")

    def call(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the outputs of a model for a batch."""
        with self.autocast():
            return self.inputs.call(model, batch, channels_last=self.config.channels_last)

    def step_losses(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Return the losses [b] that the user's training step gives.

        It gets inputs as the model takes them, targets under the names of their labels, and keys.
        """
        inputs = self.inputs.prepared(batch, channels_last=self.config.channels_last)
        labels = {head.name: batch[f"target {head.name}"] for head in self.task.heads}
        with self.autocast():
            step = cast(TrainingStep, self.training_step)
            losses = step({**labels, **inputs, "__key__": batch["__key__"]}, model)
        return losses.float().expand(len(batch["__key__"]))

    def fields(self, given: Mapping[str, Field] | None, index: Index | None) -> Fields:
        """Return the fields of the inputs: the given ones, or as validation had them in training.

        index: the shards; None for image files. Raises UsageError for fields with other inputs, and
        for a missing field of the user's.
        """
        specs = self.inputs.specs
        if given is None:
            return {name: spec.to_field() for name, spec in specs.items()}
        fields = input_fields(given, self.task, index, known=specs)
        check_same_inputs(specs, fields, f"{self.path} was trained on", sizes=True)
        return fields


# A checkpoint is data, never code. It may name a function that makes its model, but the function is
# imported and called only if the caller names it too. Otherwise `evaluate stranger.pt` would run
# functions that its author chose.

# Options of the machine that trained, which need not fit this one.
_OF_MACHINE = ("device", "num_workers", "cache_dir", "cache_limit", "on_error", "max_errors")


def load_checkpoint(
    path: str | os.PathLike[str],
    model: ModelFactory | nn.Module | str | None = None,
    options: Mapping[str, Any] | None = None,
    **own: Any,
) -> tuple[nn.Module, Setup]:
    """Return the model of a checkpoint with its weights, and how it is called.

    model: makes the model, where the checkpoint names neither "small" nor a model of torchvision or
    timm. options: in place of those of training, but for None. own: of the Setup. Raises UsageError
    for a file that is no checkpoint, and for weights of another model.
    """
    path = os.fspath(path)
    state = read_checkpoint(path)
    values = {name: own for name, own in state["config"].items() if name not in _OF_MACHINE}
    values |= {name: own for name, own in (options or {}).items() if own is not None}
    config, task = Config.of(values), Task.from_state(state["task"])
    inputs = ModelInputs.from_state(state["inputs"])
    refuse(
        model is None and is_made(config.model),
        f"{path} holds a model that a function made ({config.model}), and functions that a "
        "checkpoint names are not called.",
        "Give it: {model}.",
        model="module:function",
    )
    net = build(
        config.model if model is None else model,
        task.outputs,
        inputs.image_size or max(config.image_shape),
        is_dense=task.is_dense,
    )
    with refusing(
        f"the weights of {path} are of another model than {config.model}", "Give the same model."
    ):
        net.load_state_dict(state["model"])
    return net.eval(), Setup(task=task, config=config, inputs=inputs, path=path, **own)
