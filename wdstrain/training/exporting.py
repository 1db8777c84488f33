"""A trained model for other programs: weights alone, TorchScript, torch.export, or ONNX.

But for weights alone, what is exported takes pictures as they are, [b, 3, h, w] in 0 to 255, and normalises them itself: that step
is what is forgotten or done twice when a model moves elsewhere. What its outputs mean stands in a JSON file beside it.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from wdstrain.errors import StorageError, UsageError
from wdstrain.loader.gpu_augment import IMAGENET
from wdstrain.shards.index_io import json_bytes
from wdstrain.storage.files import put_whole, write_whole
from wdstrain.training.models import Maker
from wdstrain.training.opened import Opened
from wdstrain.training.task import is_rgb

Write = Callable[[Opened, Tensor, str], None]


class Normalising(nn.Module):
    """A model before which pictures of 0 to 255 are normalised, and after which numbers are as the labels have them.

    float or uint8 [b, 3, h, w] to [b, outputs]; other uint8 is divided by 255, and other values are taken as they are.
    """

    def __init__(self, opened: Opened) -> None:
        super().__init__()
        self.model = opened.model
        columns = [head for head in opened.task.heads for _ in range(head.outputs)]
        self.shift = nn.Buffer(torch.tensor([head.mean for head in columns]))
        self.scale = nn.Buffer(torch.tensor([head.deviation for head in columns]))
        self.mean, self.std = (
            nn.Buffer(
                torch.tensor(values).view(1, 3, 1, 1) * 255
                if _is_rgb(opened)
                else torch.tensor(plain)
            )
            for values, plain in zip(
                IMAGENET, (0.0, 255.0 if _is_uint8(opened) else 1.0), strict=True
            )
        )

    def forward(self, pixels: Tensor) -> Tensor:
        outputs: Tensor = self.model((pixels.float() - self.mean) / self.std)
        return outputs * self.scale + self.shift


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model: Maker | nn.Module | str | None = None,
) -> list[str]:
    """Write the model of a checkpoint to `out`, of the kind that its ending says; returns the files that were written.

    .pt     the state dict        .ts   TorchScript
    .pt2    torch.export          .onnx ONNX (pip install onnx onnxscript)

    model: as it was given to `train`, where that was a function or its name.
    """
    path = os.fspath(out)
    kind = os.path.splitext(path)[1].lower()
    if kind not in _KINDS:
        raise UsageError(f"{path}: its ending says of what kind it is to be: {', '.join(_KINDS)}.")
    opened = Opened.of(checkpoint, model=model)
    example = torch.rand(2, *opened.shape) * 255
    try:
        _KINDS[kind](opened, example, path)
    except (OSError, UsageError, StorageError):
        raise
    except (
        Exception
    ) as error:  # what a model holds that cannot be exported, each exporter says in its own way
        first = next(
            (line for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise UsageError(
            f"the model {opened.config.model} cannot be exported as {kind}: {first.strip()}"
        ) from error
    about = {
        "model": opened.config.model,
        "input": [None, *opened.shape],
        "normalised": _normalised(opened, kind),
        "outputs": [
            {
                "label": head.name,
                "kind": head.kind,
                "columns": head.outputs,
                "classes": list(head.classes),
            }
            | (
                {"mean": head.mean, "deviation": head.deviation}
                if kind == ".pt" and head.kind == "number"
                else {}
            )
            for head in opened.task.heads
        ],
    }
    beside = f"{path}.json"
    write_whole(beside, json_bytes(about, indent=1))
    return [path, beside]


def _state(opened: Opened, example: Tensor, path: str) -> None:
    with put_whole(path) as file:
        torch.save(opened.model.state_dict(), file)


def _torchscript(opened: Opened, example: Tensor, path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that torch.export is what it likes better
        with put_whole(path) as file:
            torch.jit.save(torch.jit.trace(Normalising(opened).eval(), example), file)  # type: ignore[no-untyped-call]


def _program(opened: Opened, example: Tensor, path: str) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        Normalising(opened).eval(), (example,), dynamic_shapes=({0: batch},)
    )
    with put_whole(path) as file:
        torch.export.save(program, file)


def _onnx(opened: Opened, example: Tensor, path: str) -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"ONNX needs {' and '.join(missing)}. Install them: pip install {' '.join(missing)}"
        )
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Normalising(opened).eval(),
            (example,),
            input_names=["pictures"],
            output_names=["outputs"],
            dynamic_shapes=({0: batch},),
            dynamo=True,
            verbose=False,
        )
    if program is None:
        raise UsageError("this version of torch makes no ONNX program. Use .pt2 or .ts.")
    with put_whole(path) as file:
        file.write(program.model_proto.SerializeToString())


def _is_uint8(opened: Opened) -> bool:
    return bool(opened.picture["dtype"] == "uint8")


def _is_rgb(opened: Opened) -> bool:
    return is_rgb(opened.shape, opened.picture["dtype"])


def _normalised(opened: Opened, kind: str) -> str:
    """Who normalises the pictures, and how."""
    if not _is_uint8(opened):
        return "as it was trained: not at all"
    if kind != ".pt":
        return "by the model: give 0 to 255"
    return (
        "by the caller: ImageNet's mean and deviation"
        if _is_rgb(opened)
        else "by the caller: divided by 255"
    )


_KINDS: dict[str, Write] = {".pt": _state, ".ts": _torchscript, ".pt2": _program, ".onnx": _onnx}
