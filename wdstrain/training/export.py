"""A trained model for other programs: its weights, torch.export, or ONNX.

Exported programs take images as they are, [b, 3, h, w] in 0 to 255, and normalize them themselves. A
JSON file beside them describes inputs and outputs.
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
from wdstrain.training.loaded_checkpoint import LoadedCheckpoint
from wdstrain.training.models import ModelFactory

Write = Callable[[LoadedCheckpoint, Tensor, str], None]


class Normalizing(nn.Module):
    """A model that normalizes its images, and returns numbers on the scale of the labels.

    Input [b, 3, h, w], output as that of the model. Arrays of uint8 that are no RGB images are
    divided by 255, and other values are taken as they are.
    """

    def __init__(self, loaded: LoadedCheckpoint) -> None:
        super().__init__()
        self.model = loaded.model
        columns = [head for head in loaded.task.heads for _ in range(head.outputs)]
        shape = (-1, 1, 1) if loaded.task.is_dense else (-1,)
        self.shift = nn.Buffer(torch.tensor([head.mean for head in columns]).view(shape))
        self.scale = nn.Buffer(torch.tensor([head.deviation for head in columns]).view(shape))
        image = loaded.image
        mean, std = torch.tensor(0.0), torch.tensor(255.0 if image.dtype == "uint8" else 1.0)
        if image.is_rgb:
            values = (image.normalization.mean, image.normalization.std)
            mean, std = (torch.tensor(value).view(1, 3, 1, 1) * 255 for value in values)
        self.mean, self.std = nn.Buffer(mean), nn.Buffer(std)

    def forward(self, pixels: Tensor) -> Tensor:
        outputs: Tensor = self.model((pixels.float() - self.mean) / self.std)
        return outputs * self.scale + self.shift


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
    example = torch.rand(2, *loaded.image.shape) * 255
    try:
        _KINDS[kind](loaded, example, path)
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
        "input": [None, *loaded.image.shape],
        "normalized": _normalized(loaded, kind),
        "outputs": outputs,
    }


def _state(loaded: LoadedCheckpoint, example: Tensor, path: str) -> None:
    with put_whole(path) as file:
        torch.save(loaded.model.state_dict(), file)


def _program(loaded: LoadedCheckpoint, example: Tensor, path: str) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        Normalizing(loaded).eval(), (example,), dynamic_shapes=({0: batch},)
    )
    with put_whole(path) as file:
        torch.export.save(program, file)


def _onnx(loaded: LoadedCheckpoint, example: Tensor, path: str) -> None:
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
            (example,),
            input_names=["pictures"],
            output_names=["outputs"],
            dynamic_shapes=({0: batch},),
            dynamo=True,
            verbose=False,
        )
    if program is None:
        raise UsageError("this version of torch makes no ONNX program. Use .pt2.")
    with put_whole(path) as file:
        file.write(program.model_proto.SerializeToString())


def _normalized(loaded: LoadedCheckpoint, kind: str) -> str:
    """Return who normalizes the images, and how."""
    normalization = loaded.image.normalization
    if loaded.image.dtype != "uint8":
        return "not normalized, as in training"
    if kind != ".pt":
        return "by the model: give 0 to 255"
    if loaded.image.is_rgb:
        return f"by the caller: mean {normalization.mean}, std {normalization.std}"
    return "by the caller: divided by 255"


_KINDS: dict[str, Write] = {".pt": _state, ".pt2": _program, ".onnx": _onnx}
