"""Convert a torchvision data set into shards, by the name of its class.

    python scripts/convert_torchvision.py FashionMNIST shards/fashion --root data

The files must be in the root already; nothing is downloaded. All options:
python -c "import wdstrain as wt; help(wt.convert_torchvision)"
"""

import argparse
import time

import wdstrain as wt


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a torchvision data set into shards.")
    parser.add_argument("name", help="class in torchvision.datasets")
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--root", required=True, help="folder of its files")
    parser.add_argument("--overwrite", action="store_true", help="replace shards in the folder")
    arguments = parser.parse_args()

    start = time.monotonic()
    index = wt.convert_torchvision(
        arguments.name, arguments.out, arguments.root, overwrite=arguments.overwrite
    )
    seconds = time.monotonic() - start
    print(f"{len(index)} samples in {len(index.shards)} shards in {seconds:.1f} s: {arguments.out}")
    for split, classes in index.info["samples"].items():
        print(f"{split}: {sum(classes.values())} samples of {len(classes)} classes")


if __name__ == "__main__":
    main()
