"""A small detector of torchvision (FCOS), trained on boxes in shards.

    python scripts/examples/train_detector.py shards/traffic --steps 500

Shards with boxes come from `wdstrain convert coco` or `wdstrain convert yolo`. Without shards, the
script draws pictures of colored rectangles into shards/drawn and trains on them.
"""

import argparse
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

import wdstrain as wt

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0)}


def draw(folder: str, count: int = 64) -> None:
    """Pack images of one rectangle each, with its box."""
    random, samples = np.random.default_rng(0), []
    for number in range(count):
        name = list(COLORS)[number % 2]
        x, y, width, height = random.integers((0, 0, 16, 16), (32, 32, 32, 32)).tolist()
        pixels = np.full((64, 64, 3), 90, np.uint8)
        pixels[y : y + height, x : x + width] = COLORS[name]
        boxes = {"boxes": [[x, y, x + width, y + height]], "labels": [name]}
        samples.append({"__key__": f"{number:03d}", "png": pixels, "boxes.json": boxes})
    label = wt.Label("boxes", "boxes", "boxes.json", classes=tuple(COLORS))
    wt.pack(samples, folder, labels=[label], overwrite=True)


def small_detector(classes: int, size: int) -> nn.Module:
    """Return a detector with four layers and one map of features, without pretrained weights."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU()]
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 64  # type: ignore[assignment]
    anchors = AnchorGenerator(sizes=((32,),), aspect_ratios=((1.0,),))
    sizes = {"min_size": size, "max_size": size}  # images have this size already
    detector: nn.Module = FCOS(backbone, classes, anchor_generator=anchors, **sizes)
    return detector


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a detector on boxes in shards.")
    parser.add_argument("shards", nargs="?", help="shards with boxes (default: drawn pictures)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=64)
    arguments = parser.parse_args()
    shards = arguments.shards or "shards/drawn"
    if arguments.shards is None:
        draw(shards)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    same: dict[str, Any] = {
        "size": arguments.image_size,
        "augment": "rrc+flip",
        "scale": (0.5, 1.0),
    }
    fields: dict[str, wt.Field] = {"image": wt.image(**same), "boxes": wt.boxes("boxes", **same)}
    loader = wt.Loader(shards, fields, batch_size=arguments.batch_size)
    classes = next(label.classes for label in loader.index.labels if label.kind == "boxes")
    model = small_detector(len(classes), arguments.image_size).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = 0
    while step < arguments.steps:  # every pass is the next epoch
        for batch in wt.to_device(loader, device):
            losses = model(list(batch["image"] / 255), batch["boxes"].targets())
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step == arguments.steps:
                break
    print(f"done; {', '.join(classes)}; {loader.report()['verdict']}")
    loader.close()


if __name__ == "__main__":
    main()
