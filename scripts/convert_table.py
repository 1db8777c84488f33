"""Convert a table with paths or bytes of images and several label columns into shards.

    python scripts/convert_table.py log.csv shards/log --image path --label angle,kind

Tables are CSV, TSV, JSON lines or Parquet. Other columns are kept in a json field. All options:
python -c "import wdstrain as wt; help(wt.convert_table)"
"""

import argparse
import time

import wdstrain as wt


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a table into shards.")
    parser.add_argument("table", nargs="+", help="table, or folder or glob of tables")
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--image", required=True, help="column of paths or bytes of images")
    parser.add_argument("--label", default="", help="columns to learn, with commas between")
    parser.add_argument("--where", help="rows to pack, such as \"kind != 'other'\"")
    parser.add_argument("--group-by", help="column whose equal values stay in one split")
    parser.add_argument(
        "--val", type=float, default=0.1, help="share of the split val; 0: no split"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace shards in the folder")
    arguments = parser.parse_args()

    split = {"train": 1 - arguments.val, "val": arguments.val} if arguments.val else None
    start = time.monotonic()
    index = wt.convert_table(
        arguments.table,
        arguments.out,
        image=arguments.image,
        label=[name for name in arguments.label.split(",") if name],
        where=arguments.where,
        group_by=arguments.group_by,
        split=split,
        on_error="skip",  # bad rows are listed in skipped.jsonl
        overwrite=arguments.overwrite,
    )
    seconds = time.monotonic() - start
    for line in index.info["source"]["decided"]:
        print(line)
    print(f"{len(index)} rows in {len(index.shards)} shards in {seconds:.1f} s: {arguments.out}")
    print(f"listed: {index.info['listed']}, skipped: {index.info['skipped']}")
    for label in index.labels:
        print(f"label {label.name}: {label.kind} {', '.join(label.classes[:10])}")


if __name__ == "__main__":
    main()
