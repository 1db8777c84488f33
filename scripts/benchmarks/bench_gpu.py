"""What a GPU gets: how fast batches come to it, how fast it varies them, and whether it ever waits.

python scripts/benchmarks/bench_gpu.py --data FOLDER           (some four minutes; needs a CUDA device; --case copy for one case)

copy     batches in the loader's memory through `wt.to_device`: 0.9 of a bare copy from page-locked memory
augment  random resized crop, flip, colour jitter, normalize (and mixup) of 256 pictures at a time by `wt.Augmentation`:
         10 times torchvision's v2 on the same uint8 pictures, one process per core
decode   JPEGs decoded by the device (torchvision's nvJPEG) beside our loader with a worker per core; for information
resnet   ResNet-50, bf16, channels last, on JPEGs through the loader: 0.97 of the same loop on a batch that is on the device
         already; stall below 1 %, by the loader's own report and by torch's profiler
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bench_loader import Bench
from record import CORES, Record, turns
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.models import resnet50
from torchvision.transforms import v2

import wdstrain as wt

COLOURS: dict[str, Any] = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}
SIDE = 224
PHOTOS = 90_000  # epochs of 351 steps, so that the wait for the first batch of an epoch has its usual share


def copy(bench: Bench, asked: argparse.Namespace) -> None:
    loader = wt.Loader(
        str(bench.photo_tars),
        {"image": wt.image(size=SIDE)},
        batch_size=asked.batch,
        num_workers=CORES,
        tail="keep",
    )
    with closing(loader):
        batches = loader.epoch(0)
        kept = [next(batches) for _ in range(3)]
        batches.lock_pages()
        kept = [{"image": one["image"]} for one in kept]
        size = kept[0]["image"].nbytes
        pinned, pageable = kept[0]["image"].clone().pin_memory(), kept[0]["image"].clone()
        out = torch.empty_like(pinned, device="cuda")
        count = 200

        def bare(source: torch.Tensor, times: int) -> float:
            return (
                _timed(lambda: [out.copy_(source, non_blocking=True) for _ in range(times)]) / times
            )

        def ours() -> float:
            def drain() -> None:
                for _ in wt.to_device(itertools.islice(itertools.cycle(kept), count), "cuda"):
                    pass

            return _timed(drain) / count

        bare(pinned, 20), ours()
        found: dict[str, list[float]] = {"bare": [], "ours": [], "pageable": []}
        for _ in turns("copy", 1 if asked.quick else 5, asked.minutes):
            found["bare"].append(size / bare(pinned, count) / 1e9)
            found["ours"].append(size / ours() / 1e9)
            found["pageable"].append(size / bare(pageable, 20) / 1e9)
        for name, rates in found.items():
            bench.say(
                "copy",
                f"{name:9} {statistics.median(rates):6.1f} ({min(rates):.1f} to {max(rates):.1f}) GB/s of {size / 1e6:.0f} MB batches",
            )
        bench.found["copy"] = found
        ratio = statistics.median(found["ours"]) / statistics.median(found["bare"])
        bench.goal("copy", "ours / bare copy from page-locked memory", ratio, 0.9)


def augment(bench: Bench, asked: argparse.Namespace) -> None:
    pictures = torch.randint(0, 256, (asked.batch, 256, 256, 3), dtype=torch.uint8).permute(
        0, 3, 1, 2
    )
    batch = {"image": pictures.cuda(), "label": torch.randint(0, 1000, (asked.batch,)).cuda()}
    draws = torch.rand(asked.batch, 64, dtype=torch.float64).numpy()
    common: dict[str, Any] = {"size": SIDE, "normalize": "imagenet", "dtype": torch.bfloat16}
    kinds = {
        "crop and flip": wt.Augmentation("rrc+flip", **common),
        "and colours": wt.Augmentation("rrc+flip", **common, **COLOURS),
        "and mixup": wt.Augmentation("rrc+flip", **common, **COLOURS, mixup=0.2, classes=1000),
        "and cutmix": wt.Augmentation("rrc+flip", **common, **COLOURS, cutmix=1.0, classes=1000),
    }
    rates = {}
    for name, varied in kinds.items():
        bench.progress("augment", name)
        for _ in range(5):
            varied(batch, draws)
        each = [_timed(partial(_often, varied, batch, draws)) / 10 for _ in range(5)]
        rates[name] = asked.batch / statistics.median(each)
        bench.say("augment", f"{name:14} {rates[name]:9.0f} pictures/s on the device")
    with get_context("fork").Pool(CORES) as pool:
        begun, done = time.perf_counter(), 0
        for done_by_one in pool.imap_unordered(_v2, [2.0] * CORES):
            done += done_by_one
        cpu = done / (time.perf_counter() - begun)
    bench.say(
        "augment",
        f"{'torchvision v2':14} {cpu:9.0f} pictures/s on {CORES} cores (crop, flip, colours, normalize)",
    )
    bench.found["augment"] = {"device": rates, "cpu": cpu}
    bench.goal(
        "augment", f"device / torchvision v2 on {CORES} cores", rates["and colours"] / cpu, 10
    )


def _often(varied: wt.Augmentation, batch: dict[str, Any], draws: Any) -> None:
    for _ in range(10):
        varied(batch, draws)


def _v2(seconds: float) -> int:
    torch.set_num_threads(1)
    jitter = v2.ColorJitter(**COLOURS)
    change = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, antialias=True),
            v2.RandomHorizontalFlip(),
            jitter,
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    picture = torch.randint(0, 256, (256, 256, 3), dtype=torch.uint8).permute(2, 0, 1)
    done, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        change(picture)
        done += 1
    return done


def decode(bench: Bench, asked: argparse.Namespace) -> None:
    files = sorted(bench.photos.rglob("*.jpg"))[:1024]
    data = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in files]
    parts = [data[at : at + asked.batch] for at in range(0, len(data), asked.batch)]
    try:
        decode_jpeg(parts[0], mode=ImageReadMode.RGB, device="cuda")
    except RuntimeError as error:
        bench.say("decode", f"on the device: not possible here ({str(error).splitlines()[0]})")
        return
    each = [
        _timed(lambda: [decode_jpeg(part, mode=ImageReadMode.RGB, device="cuda") for part in parts])
        / len(data)
        for _ in range(3)
    ]
    device = 1 / statistics.median(each)
    fields = {"image": wt.image(size=SIDE, augment="rrc+flip")}
    with closing(
        wt.Loader(str(bench.photo_tars), fields, batch_size=asked.batch, num_workers=CORES)
    ) as loader:
        cpu = _rate(loader)
    bench.say(
        "decode",
        f"on the device {device:.0f} pictures/s (whole, nothing else), our loader with {CORES} workers {cpu:.0f} (crop, flip)",
    )
    bench.found["decode"] = {"device": device, "cpu": cpu}


def _rate(loader: wt.Loader) -> float:
    for _ in loader:
        pass
    begun, count = time.perf_counter(), 0
    for _ in range(3):
        count += sum(len(batch["image"]) for batch in loader)
    return count / (time.perf_counter() - begun)


def resnet(bench: Bench, asked: argparse.Namespace) -> None:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    fields = {"image": wt.image(size=SIDE, augment="rrc+flip"), "label": wt.label()}
    loader = wt.Loader(
        str(bench.photo_tars), fields, batch_size=asked.batch, num_workers=asked.workers
    )
    made = resnet50(num_classes=1000).cuda().to(memory_format=torch.channels_last)
    model: Any = torch.compile(made) if asked.compile else made
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)
    varied = wt.Augmentation(normalize="imagenet", dtype=torch.bfloat16)
    ready = next(iter(wt.to_device(loader, "cuda", varied)))
    ready = {name: ready[name].clone() for name in ("image", "label")}

    def step(batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    endless = itertools.chain.from_iterable(_epochs(loader, varied))

    def turn(batches: Iterable[dict[str, Any]], count: int) -> float:
        total = torch.zeros((), device="cuda")

        def run() -> None:
            nonlocal total
            for batch in itertools.islice(batches, count):
                total = total + step(batch)
                if asked.item:
                    total.item()

        seconds = _timed(run)
        assert torch.isfinite(total)
        return float(count * asked.batch / seconds)

    synthetic = itertools.repeat(ready)
    turn(synthetic, 15), turn(endless, 15)
    rates: dict[str, list[float]] = {"on the device": [], "through the loader": []}
    for _ in turns("resnet", 1 if asked.quick else 5, asked.minutes):
        rates["on the device"].append(turn(synthetic, asked.steps))
        rates["through the loader"].append(turn(endless, asked.steps))
    for name, found in rates.items():
        bench.say(
            "resnet",
            f"{name:18} {statistics.median(found):7.0f} ({min(found):.0f} to {max(found):.0f}) pictures/s",
        )
    ratio = statistics.median(rates["through the loader"]) / statistics.median(
        rates["on the device"]
    )
    bench.goal("resnet", "through the loader / on the device already", ratio, 0.97, digits=3)
    idle = {
        name: _idle(partial(turn, source, 20))
        for name, source in (("synthetic", synthetic), ("loader", endless))
    }
    turn(wt.to_device(loader, "cuda", varied), len(loader))  # ends the pass that was left above
    waited = worked = 0.0
    for _ in range(1 if asked.quick else 2):  # whole epochs, the start of each included
        turn(wt.to_device(loader, "cuda", varied), len(loader))
        report = loader.report()
        waited, worked = waited + report["wait_seconds"], worked + report["loop_seconds"]
    stall = waited / (waited + worked)
    bench.say(
        "resnet",
        f"profiler: the device is idle {idle['synthetic']:.2%} of the time with data on it, {idle['loader']:.2%} through the loader",
    )
    bench.goal(
        "resnet",
        "idle time through the loader beyond that, share",
        idle["loader"] - idle["synthetic"],
        0.01,
        below=True,
        digits=4,
    )
    bench.goal(
        "resnet",
        "stall as the loader reports it, share",
        stall,
        0.01,
        below=True,
        digits=4,
    )
    bench.say(
        "resnet",
        f"report: {report['verdict']}; waited {waited:.3f} s of {waited + worked:.2f} s in epochs of {len(loader)} steps",
    )
    bench.found["resnet"] = {"rates": rates, "idle": idle, "stall": stall}
    loader.close()


def _epochs(loader: wt.Loader, varied: wt.Augmentation) -> Iterator[Iterator[dict[str, Any]]]:
    while True:
        yield wt.to_device(loader, "cuda", varied)


def _idle(work: Callable[[], object]) -> float:
    """The share of the time between the first and the last work of the device in which it computes nothing."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        work()
    spans = []
    for event in seen.events():
        if event.device_type == DeviceType.CUDA and "Memcpy HtoD" not in event.name:
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return float(1 - busy / (end - spans[0][0]))


def _timed(work: Callable[[], object]) -> float:
    """Seconds, until the device has done it."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


CASES = {"copy": copy, "augment": augment, "decode": decode, "resnet": resnet}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--case", choices=list(CASES), action="append", help="only this case; may be given again"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of class folders of JPEG photographs (default: they are drawn)",
    )
    parser.add_argument("--quick", action="store_true", help="less data, one turn each")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="after which no further turn of a case begins"
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40, help="of a turn of ResNet-50")
    parser.add_argument(
        "--workers", type=int, default=max(1, CORES - 2), help="worker processes beside ResNet-50"
    )
    parser.add_argument("--compile", action="store_true", help="ResNet-50 by torch.compile")
    parser.add_argument(
        "--item", action="store_true", help="the loop looks at every loss, as many do"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout at the end, text on stderr"
    )
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "torch finds no CUDA device here; there is nothing to measure.\n")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out = sys.stderr if asked.json else sys.stdout
        bench = Bench(Path(folder), asked.quick, asked.data, [], {}, out, photo_count=PHOTOS)
        what = f"{torch.cuda.get_device_name()}, {CORES} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
        bench.say("", what)
        for name in asked.case or CASES:
            bench.progress(name, "begins")
            CASES[name](bench, asked)
    Record("On a GPU", asked.json, asked.quick, rows=bench.said).end(
        "torch", "torchvision", device=torch.cuda.get_device_name()
    )


if __name__ == "__main__":
    main()
