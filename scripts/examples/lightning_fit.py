"""Lightning's Trainer on our loader.

    .venv/bin/python scripts/examples/lightning_fit.py 'shards/photos/train-*.tar' 'shards/photos/val-*.tar'

The loader gives each rank its own part, so Lightning has nothing to add (`use_distributed_sampler=False`). Lightning keeps the loader's
position in its checkpoints: `trainer.fit(..., ckpt_path=...)` continues in the middle of an epoch.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn

import wdstrain as wt


class Classifier(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Any], step: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch["image"] / 255), batch["label"])

    def validation_step(self, batch: dict[str, Any], step: int) -> None:
        right = self.model(batch["image"] / 255).argmax(1) == batch["label"]
        self.log("accuracy", right.float().mean(), batch_size=len(right), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with Lightning from shards.")
    parser.add_argument("train", help="shards to train on")
    parser.add_argument("val", help="shards to validate on")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    fields = {"image": wt.image(size=32), "label": wt.label()}
    loader = wt.Loader(arguments.train, fields, batch_size=16)
    val_loader = wt.Loader(arguments.val, fields, batch_size=16, shuffle=False, tail="keep")
    classes = len(loader.index.labels[0].classes)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, classes)
    )
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        use_distributed_sampler=False,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(model), loader, val_loader)
    print(
        f"accuracy {float(trainer.callback_metrics['accuracy']):.2%}; {loader.report()['verdict']}"
    )
    loader.close()
    val_loader.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
