"""Convert .npy and .npz arrays into shards.

    python scripts/convert_arrays.py shards/data --images images.npy --labels labels.npy

Files are memory-mapped, so they may be larger than memory. All options:
python -c "import wdstrain as wt; help(wt.convert_arrays)"
"""

import argparse
import time

import wdstrain as wt


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert arrays into shards.")
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--images", required=True, help="uint8 array (N, H, W[, 3]): FILE.npy")
    parser.add_argument(
        "--labels", required=True, help="class numbers: FILE.npy or FILE.npz:member"
    )
    parser.add_argument("--as-arrays", action="store_true", help="store raw arrays, not PNG")
    parser.add_argument("--overwrite", action="store_true", help="replace shards in the folder")
    arguments = parser.parse_args()

    start = time.monotonic()
    images = "image.npy" if arguments.as_arrays else "png"
    index = wt.convert_arrays(
        {images: arguments.images, "cls": arguments.labels},
        arguments.out,
        split={"train": 0.9, "val": 0.1},
        overwrite=arguments.overwrite,
    )
    seconds = time.monotonic() - start
    size = sum(shard.bytes for shard in index.shards)
    print(f"{len(index)} rows in {len(index.shards)} shards, {size / 1e6:.1f} MB: {arguments.out}")
    print(f"{len(index) / seconds:.0f} rows/s; fields: {', '.join(index.fields)}")


if __name__ == "__main__":
    main()
