"""Convert existing tar shards: shuffle, split, select and rename.

    python scripts/convert_tars.py 'old/*.tar' shards/new --rename jpeg=jpg --val 0.1

One forward pass over the old shards. All options:
python -c "import wdstrain as wt; help(wt.convert_tars)"
"""

import argparse
import time

import wdstrain as wt


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert existing shards.")
    parser.add_argument("urls", nargs="+", help="folder, index.json, tar, glob or brace pattern")
    parser.add_argument("out", help="folder for the new shards")
    parser.add_argument("--where", help="condition on columns and fields, such as 'cls < 3'")
    parser.add_argument("--rename", action="append", default=[], help="OLD=NEW")
    parser.add_argument("--val", type=float, help="share of the split val (default: old splits)")
    parser.add_argument("--overwrite", action="store_true", help="replace shards in the folder")
    arguments = parser.parse_args()

    split = {"train": 1 - arguments.val, "val": arguments.val} if arguments.val else None
    start = time.monotonic()
    index = wt.convert_tars(
        arguments.urls,
        arguments.out,
        where=arguments.where,
        rename=dict(pair.split("=", 1) for pair in arguments.rename),
        split=split,
        overwrite=arguments.overwrite,
    )
    seconds = time.monotonic() - start
    size = sum(shard.bytes for shard in index.shards)
    print(f"{len(index)} samples in {len(index.shards)} shards: {arguments.out}")
    print(f"{size / 1e6:.1f} MB in {seconds:.1f} s; fields: {', '.join(index.fields)}")
    for reason, count in index.info["ignored"].items():
        print(f"left out: {count} x {reason}")


if __name__ == "__main__":
    main()
