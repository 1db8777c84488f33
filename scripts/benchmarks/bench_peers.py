"""The contenders of bench_loader.py, each in a process of its own: ours, its peers, and what arithmetic allows.

    python scripts/benchmarks/bench_peers.py NAME JOB      (started by bench_loader.py, which asks over a pipe)

A contender prepares its own format from the same images and opens it; what it opened gives an epoch's batches each time it
is called: uint8 tensors in this process, or, where there is nothing to hand over, the number of samples that were done. How
each is set, always with one worker process or thread per core and its own shuffling:

    ImageFolder, webdataset     DataLoader, persistent workers, 4 batches ahead each; webdataset from the same tars as we,
                                shards and 1 000 samples shuffled. PIL, or torchvision's decode_jpeg; transforms v2, uint8
    LitData, MosaicML           chunks of 64 MB with the files' bytes in them, their own loader or data set, decode_jpeg and
                                v2 in the workers; arrays in their own encoding
    FFCV                        the files' own bytes in jpg mode, random order, os_cache, its fused decoder with crop and flip
    DALI                        readers.file, image_random_crop fused with the decoder, a thread per core, no device
    PyTables                    a process reads chunks of 3 200 rows in random order, shuffles each, and queues batches
    decode ...                  one process per core, bytes in memory, pixels into one place, no hand-over but a number:
                                `alone` is our own field; `simplejpeg` decodes whole pictures (then v2, if there is a crop)
    readinto                    the shards, one after another, into the same 4 MB; `128 MB`: into as much memory as our window
                                of 256 MB holds, which no processor's cache does
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

AHEAD = 4  # batches that a peer's worker may have ready
CHUNK = 3200  # rows that the PyTables loader reads at a time

Epoch = Callable[[], Iterable[Any]]
Decode = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Job:
    """What is to be loaded. kind: picture, array or bytes; shards: the same as folder.

    folder: class folders of JPEGs, or x.npy (arrays) and y.npy (a number for each).
    """

    kind: str
    folder: str
    shards: str
    out: str  # where a contender puts its own format
    side: int
    crop: bool
    batch: int
    workers: int
    tail: str = "drop"

    @property
    def tars(self) -> list[str]:
        return sorted(map(str, Path(self.shards).glob("*.tar")))

    def files(self) -> list[tuple[str, int]]:
        folders = sorted(one for one in Path(self.folder).iterdir() if one.is_dir())
        return [
            (str(path), label)
            for label, one in enumerate(folders)
            for path in sorted(one.iterdir())
        ]

    def rows(self) -> Any:
        return np.load(Path(self.folder) / "x.npy", mmap_mode="r")

    def numbers(self) -> Any:
        return np.load(Path(self.folder) / "y.npy")


@dataclass(frozen=True)
class Contender:
    open: Callable[[Job], Epoch]
    prepare: Callable[[Job], object] = lambda job: None
    install: str = ""  # how to get it


# --- ours and the limits ---------------------------------------------------------------------------------------------


def ours(job: Job, workers: int | None = None) -> Epoch:
    import wdstrain as wt

    picture = {
        "x": wt.image(size=job.side, augment="rrc+flip" if job.crop else "flip"),
        "label": wt.label(),
    }
    fields: Any = {
        "picture": picture,
        "array": {
            "x": wt.array("x.npy", shape=(job.side, job.side, 3), dtype="uint8"),
            "label": wt.number("y.npy"),
        },
        "bytes": None,
    }[job.kind]
    workers = job.workers if workers is None else workers
    tail: Any = job.tail
    loader = wt.Loader(job.shards, fields, batch_size=job.batch, num_workers=workers, tail=tail)
    names = ("jpg", "cls") if fields is None else ("x", "label")
    return lambda: (tuple(batch[name] for name in names) for batch in loader)


def alone(job: Job, *, field: bool) -> Epoch:
    """Decoding and nothing else: a process per core decodes 128 files each time it is told to."""
    files = job.files()
    todo: Any = multiprocessing.get_context("fork").SimpleQueue()
    done: Any = multiprocessing.get_context("fork").SimpleQueue()

    def work(number: int) -> None:
        torch.set_num_threads(1)
        data = [Path(path).read_bytes() for path, _ in files[number :: job.workers][:2000]]
        decode = _our_field(job) if field else _simplejpeg(job)
        endless = cycle(data)
        while todo.get():
            decode(list(islice(endless, 128)))
            done.put(128)

    for number in range(job.workers):
        multiprocessing.get_context("fork").Process(
            target=work, args=(number,), daemon=True
        ).start()
    for _ in range(2 * job.workers):
        todo.put(1)

    def epoch() -> Iterator[int]:
        for _ in range(32):
            yield done.get()
            todo.put(1)

    return epoch


def _our_field(job: Job) -> Callable[[list[bytes]], object]:
    """As our workers do it: what can be decoded at once is, into one batch's memory again and again."""
    import wdstrain as wt

    field = wt.image(size=job.side, augment="rrc+flip" if job.crop else "flip")
    out, bits = np.empty((128, job.side, job.side, 3), np.uint8), np.random.default_rng(0)

    def decode(data: list[bytes]) -> None:
        draws, rows = bits.random((len(data), 27)), np.arange(len(data))
        address = np.array([np.frombuffer(one, np.uint8).ctypes.data for one in data])
        done = field.read_rows(rows, address, np.array(list(map(len, data))), out, draws)
        for row in set(rows.tolist()) - done:
            field.read("jpg", memoryview(data[row]), out[row], draws[row])

    return decode


def _simplejpeg(job: Job) -> Callable[[list[bytes]], object]:
    simplejpeg: Any = import_module("simplejpeg")
    if job.crop:
        change = _varied(job)
        return lambda data: [
            change(torch.from_numpy(simplejpeg.decode_jpeg(one, "RGB")).permute(2, 0, 1))
            for one in data
        ]
    out = np.empty((job.side, job.side, 3), np.uint8)
    return lambda data: [simplejpeg.decode_jpeg(one, "RGB", buffer=out) for one in data]


def readinto(job: Job, size: int = 4 << 20) -> Epoch:
    """The shards read 4 MB at a time, into `size` bytes over and over."""
    import wdstrain as wt

    buffer, index = memoryview(bytearray(size)), wt.index(job.shards)
    each = sum(os.path.getsize(path) for path in job.tars) / len(index)
    places = cycle([buffer[at : at + (4 << 20)] for at in range(0, size, 4 << 20)])

    def epoch() -> Iterator[float]:
        for path in job.tars:
            with open(path, "rb", buffering=0) as file:
                while count := file.readinto(next(places)):
                    yield count / each

    return epoch


def imports(job: Job) -> Epoch:
    """As many processes as a loader has, which have imported what it imports and do nothing."""
    import_module("wdstrain")
    for _ in range(job.workers):
        multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(600,), daemon=True
        ).start()
    return lambda: [0]


# --- peers -----------------------------------------------------------------------------------------------------------


def _varied(job: Job) -> Any:
    from torchvision.transforms import v2

    flip = v2.RandomHorizontalFlip()
    return v2.Compose([v2.RandomResizedCrop(job.side, antialias=True), flip]) if job.crop else flip


def _pil(job: Job) -> Decode:
    from PIL import Image
    from torchvision.transforms.v2.functional import pil_to_tensor

    change = _varied(job)
    return lambda data: pil_to_tensor(change(Image.open(io.BytesIO(data)).convert("RGB")))


def _torchvision(job: Job) -> Decode:
    from torchvision.io import ImageReadMode, decode_jpeg

    change = _varied(job)
    return lambda data: change(
        decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
    )


def _loader(job: Job, data: Any, **options: Any) -> DataLoader[Any]:
    options = {"batch_size": job.batch, "shuffle": True, "drop_last": True} | options
    return DataLoader(
        data,
        num_workers=job.workers,
        persistent_workers=True,
        prefetch_factor=AHEAD,
        multiprocessing_context="fork",
        **options,
    )


def from_memory(job: Job, name: str) -> Epoch:
    """All files of the set in memory, decoded as they are by a DataLoader, as benchmarks of decoders do it."""
    data = [Path(path).read_bytes() for path, _ in job.files()]
    decode: Decode = dict(pillow=_pillow_alone, torchvision=_torchvision_alone)[name]
    options: Any = (
        {"persistent_workers": True, "multiprocessing_context": "fork"} if job.workers else {}
    )
    loader = DataLoader(
        _Decoded(data, decode), 32, collate_fn=len, num_workers=job.workers, **options
    )
    return lambda: map(float, loader)


class _Decoded(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, data: list[bytes], decode: Decode) -> None:
        self._data, self._decode = data, decode

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._decode(self._data[number])


def _pillow_alone(data: bytes) -> torch.Tensor:
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB")))


def _torchvision_alone(data: bytes) -> torch.Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg

    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    pixels: torch.Tensor = decode_jpeg(encoded, mode=ImageReadMode.RGB)
    return pixels


def ours_whole(job: Job) -> Epoch:
    """Our loader with images of their own sizes."""
    import wdstrain as wt

    fields = {"x": wt.image("jpg")}
    loader = wt.Loader(job.shards, fields, batch_size=32, num_workers=job.workers, tail="keep")
    return lambda: (float(len(batch["x"])) for batch in loader)


def imagefolder(job: Job, decoded: Callable[[Job], Decode]) -> Epoch:
    from torchvision.datasets import ImageFolder

    decode = decoded(job)
    loader = _loader(
        job, ImageFolder(job.folder, loader=lambda path: decode(Path(path).read_bytes()))
    )
    return lambda: loader


def webdataset(
    job: Job,
    decoded: Callable[[Job], Decode] = _pil,
    *,
    processes: bool = True,
    module: str = "webdataset",
) -> Epoch:
    wds: Any = import_module(module)  # wdstrain has a WebDataset, too
    data = wds.WebDataset(job.tars, shardshuffle=len(job.tars)).shuffle(1000)
    if job.kind == "picture":
        decode = decoded(job)
        data = data.to_tuple("jpg", "cls").map_tuple(decode, int).batched(job.batch, partial=False)
    elif job.kind == "array":
        data = (
            data.decode()
            .to_tuple("x.npy", "y.npy")
            .map_tuple(torch.from_numpy, float)
            .batched(job.batch, partial=False)
        )
    else:
        data = data.to_tuple("jpg", "cls").batched(job.batch, partial=False)
    loader = (
        _loader(job, data, batch_size=None, shuffle=False, drop_last=False) if processes else data
    )
    return lambda: loader


def _sample(job: Job, one: Any) -> dict[str, Any]:
    if job.kind == "array":
        return {
            "x": torch.from_numpy(np.array(job.rows()[one])),
            "label": float(_numbers(job)[one]),
        }
    return {"x": Path(one[0]).read_bytes(), "label": one[1]}


def _inputs(job: Job) -> list[Any]:
    return list(range(len(job.rows()))) if job.kind == "array" else list(job.files())


def _together(job: Job, samples: list[Any]) -> Any:
    """A batch, in the worker: the files' bytes are decoded."""
    if job.kind == "array":
        return default_collate([(torch.as_tensor(one["x"]), one["label"]) for one in samples])
    decode = _decoder(job)
    return default_collate([(decode(one["x"]), one["label"]) for one in samples])


_decoder = lru_cache(_torchvision)


@lru_cache(maxsize=1)
def _numbers(job: Job) -> Any:
    return job.numbers()


def litdata_prepare(job: Job) -> None:
    litdata: Any = import_module("litdata")
    litdata.optimize(
        partial(_sample, job),
        _inputs(job),
        f"{job.out}/chunks",
        chunk_bytes="64MB",
        num_workers=job.workers,
        verbose=False,
    )


def litdata(job: Job) -> Epoch:
    made: Any = import_module("litdata")
    data = made.StreamingDataset(f"{job.out}/chunks", shuffle=True, drop_last=True)
    loader = made.StreamingDataLoader(
        data,
        batch_size=job.batch,
        num_workers=job.workers,
        persistent_workers=True,
        prefetch_factor=AHEAD,
        collate_fn=partial(_together, job),
    )
    return lambda: loader


def mosaic_prepare(job: Job) -> None:
    streaming: Any = import_module("streaming")
    shape = f"ndarray:uint8:{job.side},{job.side},3"
    is_array = job.kind == "array"
    columns = {"x": shape, "label": "float64"} if is_array else {"x": "bytes", "label": "int"}
    with streaming.MDSWriter(out=f"{job.out}/mds", columns=columns, size_limit="64mb") as writer:
        for one in _inputs(job):
            sample = _sample(job, one)
            writer.write(
                {
                    name: value.numpy() if name == "x" and job.kind == "array" else value
                    for name, value in sample.items()
                }
            )


def mosaic(job: Job) -> Epoch:
    streaming: Any = import_module("streaming")
    streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(local=f"{job.out}/mds", shuffle=True, batch_size=job.batch)
    loader = _loader(job, data, shuffle=None, collate_fn=partial(_together, job))
    return lambda: loader


def ffcv_prepare(job: Job) -> None:
    writer, fields = import_module("ffcv.writer"), import_module("ffcv.fields")
    simplejpeg: Any = import_module("simplejpeg")
    if job.kind == "array":
        shape = (job.side, job.side, 3)
        columns: Any = {
            "x": fields.NDArrayField(np.dtype("uint8"), shape),
            "label": fields.FloatField(),
        }
    else:
        columns = {"x": fields.RGBImageField(write_mode="jpg"), "label": fields.IntField()}
        columns[
            "x"
        ].encode = _as_it_is  # the same bytes as everybody's: its own would be encoded once more

    class Rows:
        def __init__(self) -> None:
            self.inputs = _inputs(job)

        def __len__(self) -> int:
            return len(self.inputs)

        def __getitem__(self, number: int) -> tuple[Any, ...]:
            sample = _sample(job, self.inputs[number])
            if job.kind == "array":
                return sample["x"].numpy(), sample["label"]
            return (sample["x"], *simplejpeg.decode_jpeg_header(sample["x"])[:2]), sample["label"]

    writer.DatasetWriter(
        f"{job.out}/x.beton", columns, num_workers=job.workers
    ).from_indexed_dataset(Rows())


def _as_it_is(
    destination: Any, picture: tuple[bytes, int, int], malloc: Callable[[int], tuple[int, Any]]
) -> None:
    data, height, width = picture
    destination["mode"], destination["height"], destination["width"] = 0, height, width
    destination["data_ptr"], storage = malloc(len(data))
    storage[:] = np.frombuffer(data, np.uint8)


def ffcv(job: Job) -> Epoch:
    loading, decoders = import_module("ffcv.loader"), import_module("ffcv.fields.decoders")
    transforms = import_module("ffcv.transforms")
    pipelines: dict[str, list[Any]] = {
        "x": [decoders.NDArrayDecoder(), transforms.ToTensor()],
        "label": [decoders.FloatDecoder(), transforms.ToTensor()],
    }
    if job.kind == "picture":
        crop = decoders.RandomResizedCropRGBImageDecoder((job.side, job.side))
        decoder = crop if job.crop else decoders.SimpleRGBImageDecoder()
        pipelines["x"] = [decoder, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        pipelines["label"] = [decoders.IntDecoder(), transforms.ToTensor()]
    loader = loading.Loader(
        f"{job.out}/x.beton",
        batch_size=job.batch,
        num_workers=job.workers,
        order=loading.OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines=pipelines,
    )
    return lambda: loader


def dali(job: Job) -> Epoch:
    nvidia, fn, types = (
        import_module("nvidia.dali"),
        import_module("nvidia.dali.fn"),
        import_module("nvidia.dali.types"),
    )
    torches = import_module("nvidia.dali.plugin.pytorch")

    def graph() -> tuple[Any, Any]:
        data, label = fn.readers.file(
            file_root=job.folder, random_shuffle=True, initial_fill=1000, name="files"
        )
        if job.crop:
            area, aspect = [0.08, 1.0], [3 / 4, 4 / 3]
            pixels = fn.decoders.image_random_crop(
                data, random_area=area, random_aspect_ratio=aspect, num_attempts=10
            )
            pixels = fn.resize(
                pixels, resize_x=job.side, resize_y=job.side, interp_type=types.INTERP_LINEAR
            )
        else:
            pixels = fn.decoders.image(data)
        return fn.flip(pixels, horizontal=fn.random.coin_flip()), label

    made = nvidia.pipeline_def(graph)(
        batch_size=job.batch, num_threads=job.workers, device_id=None, prefetch_queue_depth=AHEAD
    )
    policy = torches.LastBatchPolicy.DROP
    loader = torches.DALIGenericIterator(
        [made], ["x", "label"], reader_name="files", last_batch_policy=policy, auto_reset=True
    )
    return lambda: ((batch[0]["x"], batch[0]["label"]) for batch in loader)


def pytables_prepare(job: Job) -> None:
    tables, rows = import_module("tables"), job.rows()
    with tables.open_file(f"{job.out}/x.h5", "w") as file:
        array = file.create_earray(
            "/", "x", tables.UInt8Atom(), (0, *rows.shape[1:]), expectedrows=len(rows)
        )
        file.create_array("/", "y", job.numbers())
        for start in range(0, len(rows), CHUNK):
            array.append(rows[start : start + CHUNK])


def pytables(job: Job) -> Epoch:
    context = multiprocessing.get_context("fork")
    batches: Any = context.Queue(maxsize=16)
    count = len(job.rows()) // job.batch

    def produce() -> None:
        tables, bits = import_module("tables"), np.random.default_rng(0)
        with tables.open_file(f"{job.out}/x.h5") as file:
            array, numbers = file.root.x, file.root.y
            while True:
                for start in bits.permutation(range(0, len(array), CHUNK)).tolist():
                    chunk, labels = array[start : start + CHUNK], numbers[start : start + CHUNK]
                    order = bits.permutation(len(chunk))
                    for first in range(0, len(chunk), job.batch):
                        rows = order[first : first + job.batch]
                        batches.put((chunk[rows], labels[rows]))

    context.Process(target=produce, daemon=True).start()
    return lambda: (tuple(map(torch.from_numpy, batches.get())) for _ in range(count))


_FFCV = "apt-get install libopencv-dev libturbojpeg0-dev pkg-config g++; pip install setuptools; pip install --no-build-isolation ffcv"

CONTENDERS = {
    "ours, threads": Contender(partial(ours, workers=0)),
    "ours, workers": Contender(ours),
    "decode alone": Contender(partial(alone, field=True)),
    "decode simplejpeg": Contender(partial(alone, field=False)),
    "readinto": Contender(readinto),
    "readinto 128 MB": Contender(partial(readinto, size=128 << 20)),
    "imports": Contender(imports),
    "ImageFolder": Contender(partial(imagefolder, decoded=_pil), install="pip install torchvision"),
    "ImageFolder-tv": Contender(
        partial(imagefolder, decoded=_torchvision), install="pip install torchvision"
    ),
    "webdataset": Contender(webdataset, install="pip install webdataset"),
    "webdataset-tv": Contender(
        partial(webdataset, decoded=_torchvision), install="pip install webdataset"
    ),
    "wt.WebDataset": Contender(
        partial(webdataset, decoded=_torchvision, module="wdstrain"),
    ),
    "memory, Pillow": Contender(partial(from_memory, name="pillow")),
    "memory, torchvision": Contender(partial(from_memory, name="torchvision")),
    "ours, whole images": Contender(ours_whole),
    "webdataset-1": Contender(
        partial(webdataset, processes=False), install="pip install webdataset"
    ),
    "LitData": Contender(litdata, litdata_prepare, "pip install litdata"),
    "MosaicML": Contender(mosaic, mosaic_prepare, "pip install mosaicml-streaming"),
    "FFCV": Contender(ffcv, ffcv_prepare, _FFCV),
    "DALI": Contender(dali, install="pip install nvidia-dali-cuda130"),
    "PyTables": Contender(pytables, pytables_prepare, "pip install tables"),
}

# --- the process -----------------------------------------------------------------------------------------------------


def serve(name: str, job: Job) -> None:
    """Answer what is asked on stdin, a JSON object a line, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    contender, turns = CONTENDERS[name], None
    for line in sys.stdin:
        asked = json.loads(line)
        found: dict[str, Any] = {}
        try:
            if asked["do"] == "prepare":
                contender.prepare(job)
            elif asked["do"] == "open":
                turns = Turns(contender, job)
                found = turns.first(whole=asked.get("whole", False))
            elif asked["do"] == "epoch" and turns is not None:
                turns.epoch()
            elif turns is not None:
                found = turns.turn(asked["seconds"], asked.get("step", 0.0))
        except ImportError as error:
            found = {"absent": str(error)}
        except Exception as error:  # told, and the others go on
            found = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)


class Turns:
    """A contender's batches without end, some of them measured at a time. None between two epochs."""

    def __init__(self, contender: Contender, job: Job) -> None:
        self._begun = time.perf_counter()
        self._epoch, self._job = contender.open(job), job
        self._counts = self._endless()
        self._ended = False  # whether it is at the end of an epoch

    def first(self, *, whole: bool) -> dict[str, Any]:
        """Seconds from construction to the first batch and, if all of it is read, to the end of the first epoch; its samples."""
        samples = next(self._counts) or 0.0
        first = time.perf_counter() - self._begun
        while whole and (count := next(self._counts)) is not None:
            samples += count
        return {"first": first, "epoch": time.perf_counter() - self._begun, "samples": samples}

    def turn(self, seconds: float, step: float) -> dict[str, Any]:
        """Return what whole epochs take, for at least some seconds.

        step: seconds that a trainer is busy with each batch, on another device.

        rate: samples per second. cpu: CPU seconds of this process per second. tree_cpu: CPU seconds
        of this process and its workers per 1,000 samples. wait: 99th percentile of the seconds until
        a batch comes. The first turn begins after the first epoch, later ones where the turn before
        ended.
        """
        if not self._ended:
            self.epoch()
        samples, waits, cpu, tree = 0.0, list[float](), time.process_time(), _tree_cpu(os.getpid())
        begun = asked = time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds:
            while (count := next(self._counts)) is not None:
                samples += count
                waits.append(time.perf_counter() - asked)
                time.sleep(step)
                asked = time.perf_counter()
        return {
            "rate": samples / elapsed,
            "cpu": (time.process_time() - cpu) / elapsed,
            "tree_cpu": (_tree_cpu(os.getpid()) - tree) / samples * 1000,
            "wait": float(np.percentile(waits, 99)),
        }

    def epoch(self) -> None:
        while next(self._counts) is not None:
            pass

    def _endless(self) -> Iterator[float | None]:
        checked = False
        while True:
            for batch in self._epoch():
                self._ended = False
                checked = checked or isinstance(batch, (int, float)) or _check(batch, self._job)
                yield float(batch if isinstance(batch, (int, float)) else len(batch[0]))
            self._ended = True
            yield None


def _tree_cpu(root: int) -> float:
    """Return the CPU seconds of a process and its descendants, ended ones included."""
    pids, ticks = [root], 0
    for pid in pids:
        with suppress(OSError):  # it ended meanwhile; its parent has its time
            for task in os.listdir(f"/proc/{pid}/task"):
                children = Path(f"/proc/{pid}/task/{task}/children").read_text()
                pids += map(int, children.split())
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # user, system, and both of ended children
    return ticks / os.sysconf("SC_CLK_TCK")


def _check(batch: Any, job: Job) -> bool:
    """Raise TypeError unless a batch has the contents that all contenders deliver.

    They are uint8 tensors of one size, or lists of bytes, and a label for each.
    """
    x, labels = batch[0], batch[1]
    shapes = (job.batch, job.side, job.side, 3), (job.batch, 3, job.side, job.side)
    is_array = isinstance(x, torch.Tensor) and x.dtype == torch.uint8 and tuple(x.shape) in shapes
    if not (isinstance(x[0], bytes) if job.kind == "bytes" else is_array):
        raise TypeError(f"a batch holds {type(x).__name__}, {getattr(x, 'shape', len(x))}")
    if len(labels) != job.batch:
        raise TypeError(f"a batch has {len(labels)} labels")
    return True


if __name__ == "__main__":
    serve(sys.argv[1], Job(**json.loads(sys.argv[2])))
