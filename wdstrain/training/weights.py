"""Weights to start from, parameters that are frozen, a trained model of a checkpoint, and its export.

`load` takes torchvision's weights by name, timm's, or a file: a state dict, a checkpoint of a run,
or one of another trainer. A classifier of another shape is initialized at random, and is named.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch import Tensor, nn

from wdstrain.decode.fields import Field
from wdstrain.errors import UsageError
from wdstrain.runtime.options import takes
from wdstrain.shards.index import Index
from wdstrain.shards.index_io import json_bytes
from wdstrain.storage.files import check_file_output, put_whole, write_whole
from wdstrain.training.config import Config, ExportArguments, is_made, refuse, refusing
from wdstrain.training.inputs import (
    Fields,
    ModelInputs,
    Normalization,
    call_model,
    check_same_inputs,
    constants_of,
    input_fields,
    scaled,
)
from wdstrain.training.models import TIMM, ModelFactory, build, output_layers
from wdstrain.training.options import is_file
from wdstrain.training.tasks import Task

FORMAT = 3  # of the contents of a checkpoint
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.")  # DataParallel, torch.compile, Lightning
_NESTED = (
    "model",
    "state_dict",
    "model_state_dict",
    "net",
)  # keys of checkpoints under which a state dict lies
# Heads of torchvision's Inception and segmentation models for a second loss.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.", "aux_classifier.")


# Parameters that were not in the weights, and the normalization that the weights expect.
Loaded = tuple[tuple[str, ...], Normalization | None]


def load(
    model: nn.Module, model_name: str, weights: str, classes: Sequence[Sequence[str]] = ()
) -> Loaded:
    """Load weights into a model, and return what is not in them and what they expect.

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
        (
            weights != "DEFAULT",
            "{weights}: timm's weights are DEFAULT.",
            "Name others in the model, as in timm:vit_small_patch16_224.augreg_in1k.",
            {"weights": weights},
        )
    )
    config = cast(Any, model).pretrained_cfg
    return (), (tuple(config["mean"]), tuple(config["std"]))


def _load_torchvision(model: nn.Module, model_name: str, weights: str) -> Loaded:
    from torchvision.models import get_model_weights

    has_names = model_name != "small" and ":" not in model_name
    members: Any = get_model_weights(model_name).__members__ if has_names else {}
    refuse(
        (
            weights not in members,
            f"{{weights}}: {model_name} has no such weights and no such file exists.",
            f"Use one of: {', '.join(members)}, or a file."
            if members
            else "Give a file of weights.",
            {"weights": weights},
        )
    )
    member = members[weights]
    cache = os.path.join(torch.hub.get_dir(), "checkpoints")
    with refusing(
        f"{{weights}} of {model_name} cannot be downloaded",
        f"Download {member.url} elsewhere, and put it into {cache} or give its file as weights.",
        {"weights": weights},
        errors=(OSError, RuntimeError),
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
    refuse(
        (
            not is_state,
            "{weights} holds no state dict of names and tensors.",
            "",
            {"weights": path},
        )
    )
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
    problem, hint = f"the weights {source} are of another model", "Give the model that they are of."
    with refusing(problem, hint):
        model.load_state_dict({**given, **fresh})
    return tuple(fresh)


def freeze(model: nn.Module, patterns: str) -> list[str]:
    """Freeze parameters, and return the names of those that were trained until now.

    patterns: parts of names with a comma between them: `layer1` for all of layer1, `*.bn?.*`, or
    `backbone` for all but the last layer. Raises UsageError for a pattern that matches nothing, and
    if nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for pattern in (part.strip() for part in patterns.split(",")):
        matching = [*fnmatch.filter(names, pattern), *fnmatch.filter(names, f"{pattern}.*")]
        if pattern == "backbone":
            last = output_layers(model)
            matching = [name for name in names if not name.startswith(last)]
        refuse(
            (
                not matching,
                "{freeze} matches no parameter.",
                f"Names are such as {', '.join(names[:4])}.",
                {"freeze": pattern},
            )
        )
        frozen.update(matching)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    refuse((trained <= frozen, "{freeze} leaves no parameter to train.", "", {"freeze": patterns}))
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


# --- a trained model ------------------------------------------------------------------------------
# A checkpoint is data, never code. It may name a function that makes its model, but the function is
# imported and called only if the caller names it too. Otherwise `evaluate stranger.pt` would run
# functions that its author chose.

# Options of the machine that trained, which need not fit this one.
_OF_MACHINE = ("device", "num_workers", "cache_dir", "cache_limit", "on_error", "max_errors")


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
                problem = f"{path} is damaged: the checksum of {damaged} differs."
                refuse((damaged is not None, problem, "Use another file."))
            return torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
            raise UsageError(f"{path} {other}") from error


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return a checkpoint as it was saved. Raises UsageError for another or a missing file."""
    state = _read_file(path, "is no checkpoint of a run. Name one such as RUN/checkpoints/best.pt")
    parts: dict[str, Any] = state if isinstance(state, dict) else {}
    refuse(
        (
            not {"model", "config", "task"} <= set(parts),
            f"{path} is a checkpoint of another program: it lacks model, config or task.",
        ),
        (
            parts.get("format") != FORMAT,
            f"{path} has the checkpoint format {parts.get('format')}: must be {FORMAT}.",
            "Read it with the version of wdstrain that wrote it.",
        ),
    )
    return parts


@dataclass
class LoadedCheckpoint:
    """A model with its weights, its task, its options and the inputs that it takes."""

    model: nn.Module
    task: Task
    config: Config
    path: str
    inputs: ModelInputs

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        model: ModelFactory | nn.Module | str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> LoadedCheckpoint:
        """Load a checkpoint.

        model: makes the model, where the checkpoint names neither "small" nor a model of
        torchvision or timm. options: in place of those of training, but for None. Raises UsageError
        for a file that is no checkpoint, and for weights of another model.
        """
        state = read_checkpoint(os.fspath(path))
        values = {name: own for name, own in state["config"].items() if name not in _OF_MACHINE}
        values |= {name: own for name, own in (options or {}).items() if own is not None}
        config = Config.of(values)
        task, inputs = Task.from_state(state["task"]), ModelInputs.from_state(state["inputs"])
        refuse(
            (
                model is None and is_made(config.model),
                f"{path} holds a model that a function made ({config.model}), and functions that "
                "a checkpoint names are not called.",
                "Give it: {model}.",
                {"model": "module:function"},
            )
        )
        net = build(
            config.model if model is None else model,
            task.outputs,
            inputs.image_size or max(config.image_shape),
            is_dense=task.is_dense,
        )
        problem = f"the weights of {path} are of another model than {config.model}"
        with refusing(problem, "Give the same model."):
            net.load_state_dict(state["model"])
        return cls(net.eval(), task, config, os.fspath(path), inputs)

    def fields(self, given: Mapping[str, Field] | None, index: Index | None) -> Fields:
        """Return the fields of the inputs: the given ones, or as validation had them in training.

        index: the shards; None for image files. Raises UsageError for fields with other inputs, and
        for a missing field of the user's.
        """
        if given is None:
            return {name: spec.to_field() for name, spec in self.inputs.specs.items()}
        fields = input_fields(given, self.task, index, known=self.inputs.specs)
        check_same_inputs(self.inputs.specs, fields, f"{self.path} was trained on", sizes=True)
        return fields


# --- export ---------------------------------------------------------------------------------------
# Exported programs take images as they are, [b, 3, h, w] in 0 to 255, and normalize them themselves.
# A JSON file beside them describes inputs and outputs.


class Normalizing(nn.Module):
    """A model that normalizes its images, and returns numbers on the scale of the labels.

    Inputs in the order of the checkpoint, such as images [b, 3, h, w]; output as that of the model.
    Arrays of uint8 that are no RGB images are divided by 255, other values are taken as they are.
    """

    def __init__(self, loaded: LoadedCheckpoint) -> None:
        super().__init__()
        self.model, self.inputs = loaded.model, loaded.inputs
        heads = [head for head in loaded.task.heads for _ in range(head.outputs)]
        self.is_scaled = any(head.kind == "number" for head in heads)
        # float32 is too coarse for times and coordinates
        scales = torch.tensor([(head.mean, head.deviation) for head in heads], dtype=torch.float64)
        self.shift, self.scale = (nn.Buffer(values.clone()) for values in scales.T)
        constants = constants_of(loaded.inputs.normalization, torch.device("cpu"))
        self.mean, self.std = (nn.Buffer(value.clone()) for value in constants)

    def forward(self, *inputs: Tensor) -> Tensor:
        specs = zip(self.inputs.specs.items(), inputs, strict=True)
        values = {
            name: scaled(value, self.mean, self.std, is_byte=spec.dtype == "uint8")
            for (name, spec), value in specs
        }
        outputs = call_model(self.model, values)
        return outputs.double() * self.scale + self.shift if self.is_scaled else outputs


@takes(ExportArguments)
def export(arguments: ExportArguments) -> list[str]:
    """Write the model of a checkpoint to `out`, and return the paths of the written files.

    The ending of `out` chooses the format: .pt is the state dict, .pt2 a program of torch.export,
    .onnx needs onnx and onnxscript.
    """
    path = os.fspath(arguments.out)
    kind = os.path.splitext(path)[1].lower()
    refuse((kind not in _KINDS, f"{{out}}: must end in {', '.join(_KINDS)}.", "", {"out": path}))
    check_file_output(path)
    loaded = LoadedCheckpoint.of(arguments.checkpoint, model=arguments.model)
    # exporters raise errors of many types
    problem = f"the model {loaded.config.model} cannot be exported as {kind}"
    with refusing(problem), put_whole(path) as file:
        _KINDS[kind](loaded, file)
    write_whole(f"{path}.json", json_bytes(_description(loaded, kind == ".pt"), indent=1))
    return [path, f"{path}.json"]


def _description(loaded: LoadedCheckpoint, is_bare: bool) -> dict[str, object]:
    """Return what the JSON file beside an exported model says. is_bare: it has no `Normalizing`."""
    return {
        "model": loaded.config.model,
        "normalizes": not is_bare,  # uint8 by 255, RGB images by mean and std
        "mean": loaded.inputs.normalization[0],
        "std": loaded.inputs.normalization[1],
        "inputs": [
            {"name": name, "shape": [None, *spec.shape], "dtype": spec.dtype}
            for name, spec in loaded.inputs.specs.items()
        ],
        "outputs": [
            {
                "label": head.name,
                "kind": head.kind,
                "columns": head.outputs,
                "classes": list(head.classes),
                **({"mean": head.mean, "deviation": head.deviation} if is_bare else {}),
            }
            for head in loaded.task.heads
        ],
    }


# --- formats --------------------------------------------------------------------------------------


def _exported(loaded: LoadedCheckpoint) -> dict[str, Any]:
    """Return the arguments of exporters: a program for batches of any size."""
    blank = loaded.inputs.blank(2, torch.device("cpu")).values()
    # as `scaled` takes them: only class numbers and tokens keep their type
    examples = tuple(
        value if value.dtype == torch.int64 and value.ndim <= 2 else value.float()
        for value in blank
    )
    batch = torch.export.Dim("batch", min=1)
    return {
        "mod": Normalizing(loaded).eval(),
        "args": examples,
        "dynamic_shapes": (({0: batch},) * len(examples),),
    }


def _state(loaded: LoadedCheckpoint, file: IO[bytes]) -> None:
    torch.save(loaded.model.state_dict(), file)


def _program(loaded: LoadedCheckpoint, file: IO[bytes]) -> None:
    torch.export.save(torch.export.export(**_exported(loaded)), file)


def _onnx(loaded: LoadedCheckpoint, file: IO[bytes]) -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    refuse((missing, f"ONNX needs {' and '.join(missing)}.", "Run: pip install onnx onnxscript"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            torch.export.export(**_exported(loaded)),
            input_names=list(loaded.inputs.specs),
            output_names=["outputs"],
            dynamo=True,
            verbose=False,
        )
    file.write(program.model_proto.SerializeToString())


_KINDS: dict[str, Callable[[LoadedCheckpoint, IO[bytes]], None]] = {
    ".pt": _state,
    ".pt2": _program,
    ".onnx": _onnx,
}
