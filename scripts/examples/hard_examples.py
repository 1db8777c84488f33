"""Show a model hard samples more often, and list the hardest: mistakes, or wrong labels.

    python scripts/examples/hard_examples.py shards/photos --out losses.parquet --epochs 5
    wdstrain join shards/photos losses.parquet --on key
    wdstrain show shards/photos --where "loss > 2 and right == 0"

Each epoch draws samples in proportion to their losses in the epochs before it.
"""

import argparse
from pathlib import Path

import pyarrow.parquet
import torch
import torchvision
from torch import nn

import wdstrain as wt


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an image classifier on hard samples.")
    parser.add_argument("shards", help="folder of shards with the split train")
    parser.add_argument("--out", type=Path, required=True, help="table of losses, .parquet")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--most", type=int, default=10, help="number of samples to list")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    fields = {
        "image": wt.image(size=arguments.image_size, augment="rrc+flip"),
        "label": wt.label(),
    }
    options = {"split": "train", "weights": "recorded:loss", "batch_size": arguments.batch_size}
    with wt.Loader(arguments.shards, fields, **options) as loader:
        classes = loader.index.labels[0].classes
        model = torchvision.models.resnet18(num_classes=len(classes)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in range(arguments.epochs):
            for batch in wt.to_device(loader, device):
                scores = model(batch["image"] / 255)
                losses = nn.functional.cross_entropy(scores, batch["label"], reduction="none")
                loader.record(batch, loss=losses, right=scores.argmax(1) == batch["label"])
                optimizer.zero_grad()
                losses.mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            print(f"epoch {epoch}: loss {losses.mean().item():.3f}", flush=True)
        table = loader.recorded()
    pyarrow.parquet.write_table(table, arguments.out)
    for row in table.sort_by([("loss", "descending")]).to_pylist()[: arguments.most]:
        print(f"{row['key']}: loss {row['loss']:.2f}, shown {row['times']} times")
    right = sum(table.column("right").to_pylist())
    print(f"{len(table)} of {len(loader.index)} samples were shown; {right:.0f} predicted right")


if __name__ == "__main__":
    main()
