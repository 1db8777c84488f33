"""MLflow as a callback: the options of the run, and the metrics of each epoch.

    wt.train("shards/photos", "runs/photos", callbacks=[MlflowCallback(run_name="photos")])

Needs `pip install mlflow`. MLFLOW_TRACKING_URI names the server, or a local store.
"""

from __future__ import annotations

from typing import Any

import mlflow

import wdstrain as wt


class MlflowCallback(wt.Callback):
    """Log a run. start: arguments of mlflow.start_run."""

    def __init__(self, **start: Any) -> None:
        self.start = start

    def on_train_start(self, trainer: Any) -> None:
        if trainer.is_leader:
            mlflow.start_run(**self.start)
            mlflow.log_params(vars(trainer.config))

    def on_epoch_end(self, trainer: Any, metrics: dict[str, Any]) -> None:
        if trainer.is_leader:
            numbers = {k: v for k, v in metrics.items() if isinstance(v, (int, float))}
            val = {f"val/{name}": value for name, value in metrics.get("val", {}).items()}
            mlflow.log_metrics(numbers | val, step=metrics["epoch"])

    def on_train_end(self, trainer: Any) -> None:
        if trainer.is_leader:
            mlflow.set_tag("stop_reason", trainer.stop_reason)
            mlflow.end_run()
