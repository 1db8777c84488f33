"""Train an image classifier on shards.

    python scripts/train.py shards/photos --out runs/photos --epochs 10

The shards hold the splits train and val, as the conversion scripts make them. On several GPUs:
torchrun --nproc-per-node 4 scripts/train.py ... All options: wdstrain train --help
"""

import argparse

import wdstrain as wt


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an image classifier on shards.")
    parser.add_argument("shards", help="folder of shards with the splits train and val")
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--model", default="resnet18", help="small, or a torchvision model")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--image-size", type=int, default=224, help="side of the images")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate at its peak")
    parser.add_argument("--num-workers", type=int, default=0, help="decoding processes")
    arguments = parser.parse_args()

    done = wt.train(
        arguments.shards,
        arguments.out,
        model=arguments.model,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        image_size=arguments.image_size,
        augment="rrc+flip",
        lr=arguments.lr,
        num_workers=arguments.num_workers,
        resume=True,  # continue after the last checkpoint, if there is one
    )
    for number, epoch in enumerate(done.epochs, 1):
        print(f"epoch {number}: {epoch['samples_per_second']:.0f} samples/s, {epoch['val']}")
    print(f"best: {done.best}; checkpoints, metrics and report.html are in {arguments.out}")


if __name__ == "__main__":
    main()
