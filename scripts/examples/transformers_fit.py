"""Hugging Face's Trainer on our loader, resumable in the middle of an epoch.

    .venv/bin/python scripts/examples/transformers_fit.py 'shards/photos/train-*.tar' 'shards/photos/val-*.tar'

The loader gives each rank its own part, so it takes the place of the Trainer's own. A callback saves its position beside each
checkpoint; `ignore_data_skip=True` keeps the Trainer from skipping batches a second time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import wdstrain as wt


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        layers = nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, classes)
        self.model = nn.Sequential(nn.Flatten(), *layers)

    def forward(self, image: Tensor, label: Tensor, **rest: Any) -> dict[str, Tensor]:
        logits = self.model(image / 255)
        return {"loss": nn.functional.cross_entropy(logits, label), "logits": logits}


class SavePosition(TrainerCallback):  # type: ignore[misc]
    def __init__(self, loader: wt.Loader) -> None:
        self.loader = loader

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **more: Any) -> None:
        folder = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        torch.save(self.loader.state_dict(), folder / "loader.pt")


class LoaderTrainer(Trainer):  # type: ignore[misc]
    def __init__(self, loader: wt.Loader, **options: Any) -> None:
        super().__init__(callbacks=[SavePosition(loader)], **options)
        self.loader = loader

    def get_train_dataloader(self) -> Any:
        return self.loader


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with Hugging Face's Trainer from shards.")
    parser.add_argument("train", help="shards to train on")
    parser.add_argument("val", help="shards to validate on")
    parser.add_argument("--out", default="runs/trainer", help="folder of the checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    arguments = parser.parse_args()
    fields = {"image": wt.image(size=32), "label": wt.label()}
    loader = wt.Loader(arguments.train, fields, batch_size=16)
    checkpoint = get_last_checkpoint(arguments.out) if arguments.resume else None
    if checkpoint is not None:
        loader.load_state_dict(torch.load(f"{checkpoint}/loader.pt"))
    model = Classifier(len(loader.index.labels[0].classes))
    options = TrainingArguments(
        arguments.out,
        num_train_epochs=arguments.epochs,
        save_steps=arguments.save_steps,
        learning_rate=1e-3,
        ignore_data_skip=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = LoaderTrainer(loader, model=model, args=options)
    trainer.train(resume_from_checkpoint=checkpoint)
    right = count = 0
    with torch.no_grad(), wt.Loader(arguments.val, fields, batch_size=16, tail="keep") as batches:
        for batch in wt.to_device(batches, trainer.args.device):
            logits = model(batch["image"], batch["label"])["logits"]
            right += int((logits.argmax(1) == batch["label"]).sum())
            count += len(logits)
    print(f"accuracy {right / count:.2%}; {loader.report()['verdict']}")
    loader.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
