"""Train on a Ray cluster: our loader and any model in `ray.train.torch.TorchTrainer`.

    .venv/bin/python scripts/examples/ray_train.py 'shards/photos/train-*.tar' --storage /shared/runs --workers 4 --gpu

Ray starts a process per worker and initializes torch.distributed, where the loader finds its rank:
it needs neither `prepare_data_loader` nor Ray Data. Checkpoints hold the model, the optimizer and
the position of the loader. Start the script again with the same --storage and --name to resume at
the next step, also with another number of workers that divides --lanes. Needs Ray 2.51 or newer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn

import wdstrain as wt


def train_worker(config: dict[str, Any]) -> None:
    """Train in one process. Ray calls this in each of them."""
    workers = ray.train.get_context().get_world_size()
    fields = {"image": wt.image(size=32, augment="flip"), "label": wt.label()}
    batch_size = config["batch_size"] // workers
    loader = wt.Loader(config["urls"], fields, batch_size=batch_size, lanes=config["lanes"])
    model = ray.train.torch.prepare_model(make_model(loader))  # DDP if there are several workers
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {"model": getattr(model, "module", model), "optimizer": optimizer, "loader": loader}
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    device = ray.train.torch.get_device()
    while (position := loader.next_position) < (config["epochs"], 0):
        epoch, start = position
        for step, batch in enumerate(wt.to_device(loader, device), start + 1):
            loss = nn.functional.cross_entropy(model(batch["image"] / 255), batch["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % config["checkpoint_every"] == 0 or step == len(loader):
                figures = {"epoch": epoch, "step": step, "loss": loss.item()}
                report(figures, parts)
    loader.close()


def make_model(loader: wt.Loader) -> nn.Module:
    """Return a small network. The name `classes` next to `torch` would make Ray pickle torch.classes."""
    classes = len(loader.index.labels[0].classes)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, classes)
    )


def report(figures: dict[str, Any], parts: dict[str, Any]) -> None:
    """Report figures, with a checkpoint that rank 0 writes. All workers call it at the same step."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state, Path(folder) / "state.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(figures, checkpoint=checkpoint)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train on a Ray cluster from shards.")
    parser.add_argument("urls", help="shards to train on")
    parser.add_argument("--storage", required=True, help="folder or bucket that all machines reach")
    parser.add_argument("--name", default="photos", help="name of the run in it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of all workers together")
    parser.add_argument("--lanes", type=int, default=4, help="a multiple of the workers")
    parser.add_argument("--checkpoint-every", type=int, default=1000, metavar="STEPS")
    arguments = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config=vars(arguments),
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.workers, use_gpu=arguments.gpu
        ),
        run_config=ray.train.RunConfig(
            name=arguments.name,
            storage_path=arguments.storage,
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    figures = result.metrics or {}
    print(
        f"epoch {figures['epoch'] + 1}, step {figures['step']}: loss {figures['loss']:.3f}; "
        f"{result.checkpoint}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
