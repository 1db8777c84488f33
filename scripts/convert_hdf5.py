"""Convert an HDF5 or PyTables file into shards.

    python scripts/convert_hdf5.py data.h5 shards/data --image /images --label /labels

Rows of the image data set become PNG, which loses nothing. All options:
python -c "import wdstrain as wt; help(wt.convert_hdf5)"
"""

import argparse
import time

import wdstrain as wt


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert an HDF5 file into shards.")
    parser.add_argument("file", help="HDF5 or PyTables file")
    parser.add_argument("out", help="folder for the shards")
    parser.add_argument("--image", required=True, help="data set of images, /path/in/file")
    parser.add_argument("--label", required=True, help="data set of class numbers")
    parser.add_argument("--classes", default="", help="names of the classes: cat,dog")
    parser.add_argument("--overwrite", action="store_true", help="replace shards in the folder")
    arguments = parser.parse_args()

    start = time.monotonic()
    index = wt.convert_hdf5(
        arguments.file,
        arguments.out,
        {"png": arguments.image, "cls": arguments.label},
        classes=[name for name in arguments.classes.split(",") if name],
        split={"train": 0.9, "val": 0.1},
        overwrite=arguments.overwrite,
    )
    seconds = time.monotonic() - start
    size = sum(shard.bytes for shard in index.shards)
    print(f"{len(index)} rows in {len(index.shards)} shards, {size / 1e6:.1f} MB: {arguments.out}")
    print(f"{len(index) / seconds:.0f} rows/s; fields: {', '.join(index.fields)}")


if __name__ == "__main__":
    main()
