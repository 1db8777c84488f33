"""A trained model for other programs: its weights, torch.export, or ONNX.

Exported programs take images as they are, [b, 3, h, w] in 0 to 255, and normalize them themselves.
A JSON file beside them describes inputs and outputs.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import IO, Any

import torch
from torch import Tensor, nn

from wdstrain.errors import StorageError, UsageError
from wdstrain.shards.index_io import json_bytes
from wdstrain.storage.files import check_file_output, put_whole, write_whole
from wdstrain.training.config import refuse
from wdstrain.training.inputs import InputSpec, call_model
from wdstrain.training.models import ModelFactory
from wdstrain.training.weights import LoadedCheckpoint


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
        normalization = loaded.inputs.normalization
        values = torch.tensor([normalization.mean, normalization.std]).view(2, 1, 3, 1, 1) * 255
        self.mean, self.std = (nn.Buffer(value.clone()) for value in values)

    def forward(self, *inputs: Tensor) -> Tensor:
        specs = zip(self.inputs.specs.items(), inputs, strict=True)
        values = {name: self._normalized(spec, value) for (name, spec), value in specs}
        outputs = call_model(self.model, values)
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
    refuse((kind not in _KINDS, f"out={path}: must end in {', '.join(_KINDS)}."))
    check_file_output(path)
    loaded = LoadedCheckpoint.of(checkpoint, model=model)
    try:
        with put_whole(path) as file:
            _KINDS[kind](loaded, file)
    except (OSError, UsageError, StorageError):
        raise
    except Exception as error:  # exporters raise errors of many types
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"the model {loaded.config.model} cannot be exported as {kind}: {cause}"
        ) from error
    about = json_bytes(_description(loaded, kind == ".pt"), indent=1)
    write_whole(f"{path}.json", about)
    return [path, f"{path}.json"]


def _description(loaded: LoadedCheckpoint, is_bare: bool) -> dict[str, object]:
    """Return what the JSON file beside an exported model says. is_bare: it has no `Normalizing`."""
    normalization, inputs = loaded.inputs.normalization, []
    for name, spec in loaded.inputs.specs.items():
        rule = "divided by 255"
        if spec.is_rgb:
            rule = f"mean {normalization.mean}, std {normalization.std}"
        words = f"by the caller: {rule}" if is_bare else "by the model: give 0 to 255"
        words = words if spec.dtype == "uint8" else "not normalized, as in training"
        inputs.append({"name": name, "shape": [None, *spec.shape], "normalized": words})
    scales = {
        head.name: {"mean": head.mean, "deviation": head.deviation}
        for head in loaded.task.heads
        if is_bare and head.kind == "number"
    }
    outputs = [
        {
            "label": head.name,
            "kind": head.kind,
            "columns": head.outputs,
            "classes": list(head.classes),
            **scales.get(head.name, {}),
        }
        for head in loaded.task.heads
    ]
    return {"model": loaded.config.model, "inputs": inputs, "outputs": outputs}


# --- formats --------------------------------------------------------------------------------------


def _exported(loaded: LoadedCheckpoint) -> dict[str, Any]:
    """Return the arguments of exporters: a program for batches of any size."""
    examples = tuple(
        torch.zeros(2, *spec.shape, dtype=torch.int64 if spec.keeps_type else torch.float32)
        for spec in loaded.inputs.specs.values()
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
