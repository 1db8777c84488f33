"""Weights & Biases as a callback: the options of the run, and the metrics of each epoch.

    wt.train("shards/photos", "runs/photos", callbacks=[WandbCallback(project="photos")])

Needs `pip install wandb`. WANDB_MODE=offline writes to ./wandb, for `wandb sync` later.
"""

from __future__ import annotations

from typing import Any

import wandb

import wdstrain as wt


class WandbCallback(wt.Callback):
    """Log a run. init: arguments of wandb.init."""

    def __init__(self, **init: Any) -> None:
        self.init = init

    def on_train_start(self, trainer: Any) -> None:
        if trainer.is_leader:
            self.run = wandb.init(config=vars(trainer.config), **self.init)

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        if trainer.is_leader:
            numbers = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
            val = {f"val/{name}": value for name, value in metrics.get("val", {}).items()}
            self.run.log(numbers | val, step=metrics["epoch"])

    def on_train_end(self, trainer: Any) -> None:
        if trainer.is_leader:
            self.run.summary["stop_reason"] = trainer.stop_reason
            self.run.finish()
