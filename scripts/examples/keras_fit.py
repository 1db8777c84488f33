"""Train with Keras 3 on torch from a wdstrain loader.

    pip install keras
    .venv/bin/python scripts/examples/keras_fit.py 'shards/photos/train-*.tar' 'shards/photos/val-*.tar'

Keras takes a generator of (images, labels) and the number of batches of an epoch: len(loader), known before the first read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

import wdstrain as wt

os.environ["KERAS_BACKEND"] = "torch"

import keras

Pairs = Iterator[tuple[Tensor, Tensor]]


def pairs(batches: Iterable[dict[str, Any]]) -> Pairs:
    """Yield (images, labels); images are float [b, h, w, 3]."""
    for batch in batches:
        yield batch["image"].permute(0, 2, 3, 1).float() / 255, batch["label"]


def endless(loader: wt.Loader) -> Pairs:
    """Yield (images, labels) of one epoch after another."""
    while True:
        yield from pairs(loader)


class Validation(keras.callbacks.Callback):  # type: ignore[misc]
    """Validates on one whole pass after each epoch.

    Keras reads ahead in `validation_data`, so its next validation would begin within the set.
    """

    def __init__(self, loader: wt.Loader) -> None:
        super().__init__()
        self.loader = loader

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        batches = pairs(self.loader.epoch(0, until=1))
        scores = self.model.evaluate(batches, verbose=0, return_dict=True)
        logs |= {f"val_{name}": score for name, score in scores.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with Keras from shards.")
    parser.add_argument("train", help="shards to train on")
    parser.add_argument("val", help="shards to validate on")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    fields = {"image": wt.image(size=32), "label": wt.label()}
    loader = wt.Loader(arguments.train, fields, batch_size=16)
    val_loader = wt.Loader(arguments.val, fields, batch_size=16, shuffle=False, tail="keep")
    model = keras.Sequential(
        [
            keras.layers.Input((32, 32, 3)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(len(loader.index.labels[0].classes), activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    fitted = model.fit(
        endless(loader),
        steps_per_epoch=len(loader),
        callbacks=[Validation(val_loader)],
        epochs=arguments.epochs,
        verbose=0,
    )
    print(f"accuracy {fitted.history['val_accuracy'][-1]:.2%}; {loader.report()['verdict']}")
    loader.close()
    val_loader.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
