"""A trained model for other programs: its weights, torch.export, or ONNX.

Exported programs take images as they are, [b, 3, h, w] in 0 to 255, and normalize them themselves.
A JSON file beside them describes inputs and outputs.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from wdstrain.errors import StorageError, UsageError
from wdstrain.shards.index_io import json_bytes
from wdstrain.storage.files import check_file_output, put_whole, write_whole
from wdstrain.training.inputs import InputSpec
from wdstrain.training.models import ModelFactory
from wdstrain.training.weights import LoadedCheckpoint

Write = Callable[[LoadedCheckpoint, tuple[Tensor, ...], str], None]


class Normalizing(nn.Module):
    """A model that normalizes its images, and returns numbers on the scale of the labels.

    Inputs in the order of the checkpoint, such as images [b, 3, h, w]; output as that of the model.
    Arrays of uint8 that are no RGB images are divided by 255, other values are taken as they are.
    """

    def __init__(self, loaded: LoadedCheckpoint) -> None:
        super().__init__()
        self.model = loaded.model
        columns = [head for head in loaded.task.heads for _ in range(head.outputs)]
        shape = (-1, 1, 1) if loaded.task.is_dense else (-1,)
        self.is_scaled = any(head.kind == "number" for head in columns)
        # float32 is too coarse for times and coordinates
        shift = torch.tensor([head.mean for head in columns], dtype=torch.float64)
        scale = torch.tensor([head.deviation for head in columns], dtype=torch.float64)
        self.shift, self.scale = nn.Buffer(shift.view(shape)), nn.Buffer(scale.view(shape))
        self.inputs = loaded.inputs
        values = (loaded.inputs.normalization.mean, loaded.inputs.normalization.std)
        mean, std = (torch.tensor(value).view(1, 3, 1, 1) * 255 for value in values)
        self.mean, self.std = nn.Buffer(mean), nn.Buffer(std)

    def forward(self, *inputs: Tensor) -> Tensor:
        parts = zip(self.inputs.specs.items(), inputs, strict=True)
        values = {name: self._normalized(spec, value) for (name, spec), value in parts}
        single = len(values) == 1
        outputs: Tensor = self.model(*values.values()) if single else self.model(**values)
        return outputs.double() * self.scale + self.shift if self.is_scaled else outputs

    def _normalized(self, spec: InputSpec, value: Tensor) -> Tensor:
        if spec.is_rgb:
            return (value.float() - self.mean) / self.std
        if spec.dtype == "uint8":
            return value.float() / 255
        return value if spec.keeps_type else value.float()


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model: ModelFactory | nn.Module | str | None = None,
) -> list[str]:
    """Write the model of a checkpoint to `out`, and return the paths of the written files.

    The ending of `out` chooses the format:

    .pt     the state dict
    .pt2    torch.export
    .onnx   ONNX (pip install onnx onnxscript)

    model: as it was given to `train`, if it was a function, its name, or a module.
    """
    path = os.fspath(out)
    kind = os.path.splitext(path)[1].lower()
    if kind not in _KINDS:
        raise UsageError(f"out={path}: must end in {', '.join(_KINDS)}.")
    check_file_output(path)
    loaded = LoadedCheckpoint.of(checkpoint, model=model)
    examples = tuple(_example(spec) for spec in loaded.inputs.specs.values())
    try:
        _KINDS[kind](loaded, examples, path)
    except (OSError, UsageError, StorageError):
        raise
    except Exception as error:  # exporters raise errors of many types
        lines = (line for line in str(error).splitlines() if line.strip())
        cause = next(lines, type(error).__name__).strip()
        raise UsageError(
            f"the model {loaded.config.model} cannot be exported as {kind}: {cause}"
        ) from error
    about = f"{path}.json"
    write_whole(about, json_bytes(_description(loaded, kind), indent=1))
    return [path, about]


def _example(spec: InputSpec) -> Tensor:
    """Return a batch of two values of an input, as an exported program takes them."""
    if spec.keeps_type:
        return torch.zeros(2, *spec.shape, dtype=torch.int64)
    return torch.rand(2, *spec.shape) * 255


def _description(loaded: LoadedCheckpoint, kind: str) -> dict[str, object]:
    """Return what the JSON file beside an exported model says."""
    outputs = []
    for head in loaded.task.heads:
        output = {
            "label": head.name,
            "kind": head.kind,
            "columns": head.outputs,
            "classes": list(head.classes),
        }
        if kind == ".pt" and head.kind == "number":
            output |= {"mean": head.mean, "deviation": head.deviation}
        outputs.append(output)
    return {
        "model": loaded.config.model,
        "inputs": [
            {"name": n, "shape": [None, *s.shape], "normalized": _normalized(loaded, s, kind)}
            for n, s in loaded.inputs.specs.items()
        ],
        "outputs": outputs,
    }


def _state(loaded: LoadedCheckpoint, examples: tuple[Tensor, ...], path: str) -> None:
    with put_whole(path) as file:
        torch.save(loaded.model.state_dict(), file)


def _program(loaded: LoadedCheckpoint, examples: tuple[Tensor, ...], path: str) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        Normalizing(loaded).eval(), examples, dynamic_shapes=(({0: batch},) * len(examples),)
    )
    with put_whole(path) as file:
        torch.export.save(program, file)


def _onnx(loaded: LoadedCheckpoint, examples: tuple[Tensor, ...], path: str) -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"ONNX needs {' and '.join(missing)}. Install them: pip install {' '.join(missing)}"
        )
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Normalizing(loaded).eval(),
            examples,
            input_names=list(loaded.inputs.specs),
            output_names=["outputs"],
            dynamic_shapes=(({0: batch},) * len(examples),),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    with put_whole(path) as file:
        file.write(program.model_proto.SerializeToString())


def _normalized(loaded: LoadedCheckpoint, spec: InputSpec, kind: str) -> str:
    """Return who normalizes an input, and how."""
    normalization = loaded.inputs.normalization
    if spec.dtype != "uint8":
        return "not normalized, as in training"
    if kind != ".pt":
        return "by the model: give 0 to 255"
    if spec.is_rgb:
        return f"by the caller: mean {normalization.mean}, std {normalization.std}"
    return "by the caller: divided by 255"


_KINDS: dict[str, Write] = {".pt": _state, ".pt2": _program, ".onnx": _onnx}
