"""Convert a folder of class folders into shards.

    python scripts/convert_folder.py photos/ shards/photos --val 0.1

Images are stored as they are; `resize=` in the call below makes them smaller. All options:
python -c "import wdstrain as wt; help(wt.convert_folder)"
"""

import argparse
import time

import wdstrain as wt


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert class folders into shards.")
    parser.add_argument("source", help="folder with a folder for each class")
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument(
        "--val", type=float, default=0.1, help="share of the split val; 0: no split"
    )
    parser.add_argument("--resize", type=int, help="shorter side of the images, in pixels")
    parser.add_argument("--overwrite", action="store_true", help="replace shards in the folder")
    arguments = parser.parse_args()

    split = {"train": 1 - arguments.val, "val": arguments.val} if arguments.val else None
    start = time.monotonic()
    index = wt.convert_folder(
        arguments.source,
        arguments.out,
        split=split,
        stratify="label" if split else None,  # the shares are exact within each class
        resize=arguments.resize,
        on_error="skip",  # bad images are listed in skipped.jsonl
        overwrite=arguments.overwrite,
    )
    seconds = time.monotonic() - start
    print(f"{len(index)} images in {len(index.shards)} shards in {seconds:.1f} s: {arguments.out}")
    for split, classes in index.info["samples"].items():
        print(f"{split}: " + ", ".join(f"{name} {count}" for name, count in classes.items()))
    print(f"skipped: {index.info['skipped']}, renamed: {index.info['renamed']}")


if __name__ == "__main__":
    main()
