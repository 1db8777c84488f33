"""How fast shards on a server are read, beside bare urllib3 and webdataset's pipe to curl.

    python scripts/benchmarks/bench_http.py          (some twenty minutes; --quick for a look, --case NAME for one case)
    python scripts/benchmarks/bench_http.py --json > scripts/benchmarks/results/http.json

Cases, each measured in turn with its rivals, several times, medians and the spread:

    raw      loopback, nginx, 512 MB in shards of 64 MB, samples of 100 KB. `urllib3` reads whole shards over one connection
             into one buffer (readinto of 8 MB). `Forward` reads ranges of 4 MB as the reader does. `webdataset` goes
             through pipe:curl and gives undecoded samples. `Loader` gives shuffled batches of bytes of a first epoch.
             Goals: Forward 0.70 of urllib3 and twice webdataset
    far      a link of 200 Mbit/s and a round trip of 50 ms, shared by all connections: the share of 25 MB/s that arrives
             between the request for the first batch and the last one, 150 MB. Goal: 0.95
    check    what the comparison of checksums costs: the same index with its crc32, without, and without once more, which
             shows how much two equal measurements differ. Mean ratio of the turns and its standard error
    cache    the loader of `raw` without a cache, while it fills one, from it, and from local shards
    serve    `wdstrain serve` beside nginx: ranges of 4 MB by http.client, over one connection and over six at once

The far link is a process between client and server, as many kernels lack netem. Each direction takes 25 ms. A new connection
takes one more round trip. Answers of all connections share 25 MB/s. A connection has at most 4 MB under way, 15 KB at first
and twice as much after each round trip (SLOW_START = None ends that). At most 50 ms of bytes wait in the queue, and nothing
is lost. Six plain connections must reach 98 % of the link before anything is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import io
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import urllib3
from PIL import Image
from record import Record, turns
from steal_time import undisturbed

import wdstrain as wt
from wdstrain.reader.reader import Reader
from wdstrain.reader.run import Run
from wdstrain.serve import Server
from wdstrain.shards.index import Index
from wdstrain.shards.resolve import scan

PIECE = 4 << 20  # bytes of one read of our reader
RATE = 25e6  # bytes per second of the far link: 200 Mbit/s, over all connections
DELAY = 0.025  # seconds of each direction of the far link
QUEUE = 2 * DELAY  # seconds of bytes that wait before the far link, at most
WINDOW = 4 << 20  # bytes of one connection under way, at most
SLOW_START = (
    15_000  # of a new connection, twice as many each round trip; None: WINDOW from the start
)
_CHUNK = 16 << 10  # bytes that the far link takes at a time, at most

Rates = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less data, fewer repeats")
    parser.add_argument(
        "--case", choices=list(CASES), action="append", help="only this case; may be given again"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout at the end, text on stderr"
    )
    arguments = parser.parse_args()
    record = Record("From a server", arguments.json, arguments.quick)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then as well
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.case or CASES:
            CASES[name](Path(folder), record)
    record.end("torch", "urllib3", "webdataset")


# --- cases -----------------------------------------------------------------------------------------------------------


def raw(place: Path, record: Record) -> None:
    quick = record.quick
    made = packed(place, total=128_000_000 if quick else 512_000_000, shard=64_000_000)
    with serving(place) as url:
        index = wt.Loader(f"{url}/{made.name}").index
        urls = [shard.path for shard in index.shards]
        rates = measured(
            {
                "urllib3": partial(bare, urls),
                "Forward": partial(forward, index),
                "webdataset": partial(piped, urls),
                "Loader": partial(read, index),
            },
            repeats=3 if quick else 7,
        )
    table(record, "raw", "MB/s", rates)
    ratio(record, "raw", rates, "Forward", "urllib3", goal=None if quick else 0.70)
    ratio(record, "raw", rates, "Forward", "webdataset", goal=None if quick else 2.0)
    ratio(record, "raw", rates, "Loader", "webdataset")


def far(place: Path, record: Record) -> None:
    quick = record.quick
    total, repeats = (40_000_000, 1) if quick else (150_000_000, 3)
    opening: list[float] = []

    def ours(doors: Iterator[str], made: Path) -> float:
        begun = time.perf_counter()
        loader = wt.Loader(
            f"{next(doors)}/{made.name}", batch_size=64, shuffle_buffer=128, tail="keep"
        )
        opening.append(time.perf_counter() - begun)
        return looped(loader)

    def theirs(doors: Iterator[str], made: Path) -> float:
        host = f"{next(doors)}/{made.name}"
        return piped([f"{host}/{tar}" for tar in tars(made)])

    with serving(place) as url, distant(url, doors=12 * (repeats + 1) + 1) as doors:
        for shard in (4_000_000, 32_000_000, 100_000_000):
            made = packed(place, total=max(total, 4 * shard), shard=shard)
            if shard == 4_000_000:
                validate(record, f"{next(doors)}/{made.name}", made)
            name = f"{shard // 1_000_000} MB shards"
            rates = measured({f"Loader, {name}": partial(ours, doors, made)}, repeats)
            rates |= measured({f"webdataset, {name}": partial(theirs, doors, made)}, 1)
            shares = {who: [rate * 1e6 / RATE for rate in found] for who, found in rates.items()}
            table(record, "far", "of the link", shares)
            if not quick:
                share = statistics.median(shares[f"Loader, {name}"])
                record.say("far", f"Loader, {name}{verdict(share, 0.95)}")
    spread = f"({min(opening):.2f} to {max(opening):.2f})"
    record.say("far", f"opening the index: {statistics.median(opening):.2f} s {spread}")


def check(place: Path, record: Record) -> None:
    quick = record.quick
    total = 64_000_000 if quick else 256_000_000
    sets = {
        f"{size // 1000} KB": packed(place, total=total, shard=64_000_000, size=size)
        for size in (8_000, 100_000)
    }
    sets["pictures"] = pictures(place, count=2000)
    for what, made in sets.items():
        reader = decoded if what == "pictures" else read
        with serving(place) as url:
            index = wt.Loader(f"{url}/{made.name}").index
            blind = replace(index, offsets=scan(shard.path for shard in index.shards).offsets)
            with_crc, without, again = (
                f"{what}, {name}" for name in ("crc32", "none", "none again")
            )
            rivals = {
                with_crc: partial(reader, index, epochs=4),
                without: partial(reader, blind, epochs=4),
                again: partial(reader, blind, epochs=4),
            }
            rates = measured(rivals, repeats=3 if quick else 15 if what == "pictures" else 30)
        table(record, "check", "MB/s" if reader is read else "pictures/s", rates)
        ratio(record, "check", rates, with_crc, without)
        ratio(record, "check", rates, again, without)


def cache(place: Path, record: Record) -> None:
    quick = record.quick
    made = packed(place, total=128_000_000 if quick else 512_000_000, shard=64_000_000)
    with serving(place) as url:
        index = wt.Loader(f"{url}/{made.name}").index
        cold = itertools.count()

        def kept(name: str) -> float:
            return looped(wt.Loader(index, batch_size=64, tail="keep", cache_dir=place / name))

        kept("warm")
        rates = measured(
            {
                "no cache": partial(read, index),
                "filling": lambda: kept(f"cold-{next(cold)}"),
                "from the cache": lambda: kept("warm"),
                "local": lambda: read(wt.Loader(made).index),
            },
            repeats=2 if quick else 5,
        )
    table(record, "cache", "MB/s", rates)
    ratio(record, "cache", rates, "filling", "no cache")
    ratio(record, "cache", rates, "from the cache", "local")


def serve_(place: Path, record: Record) -> None:
    quick = record.quick
    made = packed(place, total=128_000_000 if quick else 512_000_000, shard=64_000_000)
    with serving(place) as nginx, process(serve, str(place)) as ports:
        doors = {"nginx": nginx, "serve": f"http://127.0.0.1:{ports[0]}"}
        for connections in (1, 6):
            rates = measured(
                {
                    f"{name}, {connections} at once": partial(
                        ranges, f"{door}/{made.name}", made, connections
                    )
                    for name, door in doors.items()
                },
                repeats=3 if quick else 7,
            )
            table(record, "serve", "MB/s", rates)
            ratio(
                record,
                "serve",
                rates,
                f"serve, {connections} at once",
                f"nginx, {connections} at once",
            )


CASES: dict[str, Callable[[Path, Record], None]] = {
    "raw": raw,
    "far": far,
    "check": check,
    "cache": cache,
    "serve": serve_,
}


# --- who is measured: each returns MB/s, but for what decodes ------------------------------------------------------


def bare(urls: list[str]) -> float:
    """One connection, whole shards, into one buffer."""
    pool, buffer, count = urllib3.PoolManager(), memoryview(bytearray(8 << 20)), 0
    begun = time.perf_counter()
    for url in urls:
        response = pool.request("GET", url, preload_content=False)
        while found := response.readinto(buffer):
            count += found
        response.release_conn()
    return count / (time.perf_counter() - begun) / 1e6


def forward(index: Index) -> float:
    """What the reader of a loader does, without a loader."""
    plans = wt.Loader(index, batch_size=64, shuffle=False, tail="keep").plan
    begun = time.perf_counter()
    reader = Reader(index, plans, 0, ahead=8 * PIECE, in_flight=1)
    run = Run(reader, 0, 0, until=1)
    run.start()
    while (batch := run.next()) is not None:
        run.release(batch.number)
    seconds = time.perf_counter() - begun
    run.close()
    return reader.stats.bytes / seconds / 1e6


def ranges(url: str, made: Path, connections: int) -> float:
    """Ranges of 4 MB of all shards, over so many connections, into one buffer each."""
    todo = deque(
        (tar, at) for tar in tars(made) for at in range(0, (made / tar).stat().st_size, PIECE)
    )
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    path, counts = "/" + url.removeprefix("http://").partition("/")[2], [0] * connections

    def fetch(number: int) -> None:
        connection, buffer = (
            http.client.HTTPConnection(host, int(port)),
            memoryview(bytearray(PIECE)),
        )
        while todo:
            with suppress(IndexError):  # another was faster
                tar, at = todo.popleft()
                connection.request(
                    "GET", f"{path}/{tar}", headers={"Range": f"bytes={at}-{at + PIECE - 1}"}
                )
                response = connection.getresponse()
                while found := response.readinto(buffer):
                    counts[number] += found
        connection.close()

    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(connections)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begun) / 1e6


def piped(urls: list[str]) -> float:
    import webdataset

    begun = time.perf_counter()
    samples = webdataset.WebDataset([f"pipe:curl -s {url}" for url in urls], shardshuffle=False)
    count = sum(len(sample["bin"]) for sample in samples)
    return count / (time.perf_counter() - begun) / 1e6


def read(index: Index, epochs: int = 1) -> float:
    return looped(wt.Loader(index, batch_size=64, tail="keep"), epochs)


def decoded(index: Index, epochs: int) -> float:
    """Pictures per second."""
    loader = wt.Loader(index, {"image": wt.image(size=128)}, batch_size=64, tail="keep")
    begun = time.perf_counter()
    count = sum(len(batch["image"]) for _ in range(epochs) for batch in loader)
    seconds = time.perf_counter() - begun
    loader.close()
    return count / seconds


def looped(loader: wt.Loader, epochs: int = 1) -> float:
    """From asking for the first batch to having the last one; the index is open."""
    begun = time.perf_counter()
    count = sum(len(one) for _ in range(epochs) for batch in loader for one in batch["bin"])
    seconds = time.perf_counter() - begun
    loader.close()
    return count / seconds / 1e6


def measured(rivals: Mapping[str, Callable[[], float]], repeats: int) -> Rates:
    """In turn, so that what the machine does besides hits all alike; each as often first, second and so on, after others that are drawn
    anew, for what one leaves behind hits the next. What other machines disturbed is measured again. `turns` bounds the time."""
    rates: Rates = {name: [] for name in rivals}
    names = list(rivals)
    for turn in turns(", ".join(names), repeats):
        first = turn % len(names)
        if first == 0:
            random.shuffle(names)
        for name in names[first:] + names[:first]:
            rates[name].append(undisturbed(rivals[name])[0])
    return rates


def table(record: Record, case: str, unit: str, rates: Rates) -> None:
    for name, found in rates.items():
        digits = 2 if unit.startswith("of") else 0
        spread = f"({min(found):.{digits}f} to {max(found):.{digits}f}, {len(found)} times)"
        record.say(case, f"{name}: {statistics.median(found):.{digits}f} {unit} {spread}")


def ratio(
    record: Record, case: str, rates: Rates, one: str, other: str, goal: float | None = None
) -> None:
    """Of the medians, and of the ratios of each turn the spread, and their mean with its standard error."""
    found = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
    middle = statistics.median(rates[one]) / statistics.median(rates[other])
    spread = f"({min(found):.2f} to {max(found):.2f}"
    if len(found) > 2:
        spread += f", mean {statistics.mean(found):.3f} +- {statistics.stdev(found) / len(found) ** 0.5:.3f}"
    spread += ")"
    record.say(case, f"{one} / {other} = {middle:.2f} {spread}{verdict(middle, goal)}")


def verdict(value: float, goal: float | None) -> str:
    return "" if goal is None else f", goal {goal:.2f}: {'met' if value >= goal else 'MISSED'}"


# --- shards ----------------------------------------------------------------------------------------------------------


def packed(place: Path, *, total: int, shard: int, size: int = 100_000) -> Path:
    """A folder of shards of noise, made once."""
    folder = place / f"{size}-{shard}-{total}"
    if not folder.exists():
        bits = np.random.default_rng(0)
        samples = (
            {"__key__": f"k{number:07d}", "bin": bits.bytes(size)}
            for number in range(total // size)
        )
        wt.pack(samples, str(folder), max_shard_size=shard, shuffle=False)
    return folder


def pictures(place: Path, count: int) -> Path:
    """A folder of shards of JPEGs, made once: colours that run into one another, 500 x 375, some 30 KB each."""
    folder = place / f"pictures-{count}"
    bits = np.random.default_rng(0)

    def drawn(number: int) -> dict[str, object]:
        coarse = Image.fromarray(bits.integers(0, 255, (40, 50, 3), np.uint8))
        data = io.BytesIO()
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
        return {"__key__": f"k{number:07d}", "jpg": data.getvalue()}

    if not folder.exists():
        wt.pack(map(drawn, range(count)), str(folder), max_shard_size=16_000_000, shuffle=False)
    return folder


def tars(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.tar"))


# --- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """The address of a server of this folder: nginx, or our own where there is none."""
    own = Path(__file__).resolve().parents[2] / ".venv" / "nginx" / "usr" / "sbin" / "nginx"
    program = str(own) if own.exists() else shutil.which("nginx")
    if program is None:
        print(
            "nginx is not here (scripts/test.sh unpacks it): wdstrain's own server is read",
            file=sys.stderr,
        )
        with process(serve, str(root)) as ports:
            yield f"http://127.0.0.1:{ports[0]}"
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as own_place:
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temps = " ".join(f"{kind}_temp_path {own_place}/{kind};" for kind in kinds)
        config = Path(own_place) / "nginx.conf"
        config.write_text(
            f"{'user root;' if os.geteuid() == 0 else ''} daemon off; pid {own_place}/pid; events {{}}\n"
            f"http {{ access_log off; sendfile on; tcp_nopush on; {temps}\n"
            f"server {{ listen 127.0.0.1:{port}; root {root}; }} }}\n"
        )
        command = [program, "-e", f"{own_place}/error.log", "-c", str(config), "-p", own_place]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                while not connects(port):
                    if server.poll() is not None:
                        sys.exit(f"nginx ended at once with {server.returncode}.")
                    time.sleep(0.02)
                yield f"http://127.0.0.1:{port}"
            finally:
                server.terminate()


def connects(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def process(target: Callable[..., None], *words: object) -> Iterator[list[int]]:
    """A process of its own that runs target(pipe, *words) and says over the pipe at which ports it listens."""
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    started = context.Process(target=target, args=(other, *words), daemon=True)
    started.start()
    other.close()
    try:
        yield mine.recv()
    finally:
        started.terminate()
        started.join()


def serve(pipe: Connection, root: str) -> None:
    with Server(root) as server:
        pipe.send([int(server.url.rpartition(":")[2].strip("/"))])
        server.wait()


# --- the far link ----------------------------------------------------------------------------------------------------


@contextmanager
def distant(url: str, doors: int) -> Iterator[Iterator[str]]:
    """Addresses of the same server behind one far link, each with new connections."""
    with process(link, int(url.rpartition(":")[2]), doors) as ports:
        yield iter([f"http://127.0.0.1:{port}" for port in ports])


def validate(record: Record, url: str, made: Path) -> None:
    """Say what six plain connections get out of the link once they are up to speed."""
    counts, end = [0] * 6, time.perf_counter() + 3.5

    def read(number: int) -> None:
        pool = urllib3.PoolManager()
        for tar in itertools.cycle(tars(made)):
            response = pool.request("GET", f"{url}/{tar}", preload_content=False)
            while found := response.read1(64 << 10):
                counts[number] += len(found)
                if time.perf_counter() > end:
                    response.close()
                    return
            response.release_conn()

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(counts))]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    begun, before = time.perf_counter(), sum(counts)
    time.sleep(2.4)
    share = (sum(counts) - before) / (time.perf_counter() - begun) / RATE
    for thread in threads:
        thread.join()
    word = "" if share >= 0.98 else ": TOO LITTLE, the link is not what it should be"
    record.say("far", f"six plain connections get {share:.3f} of the link{word}")


def link(pipe: Connection, port: int, doors: int) -> None:
    """The link, as a process: what comes in at one of its ports leaves for the server, later, and so do the answers."""
    asyncio.run(Link(port).carry(pipe, doors))


@dataclass
class Link:
    port: int  # of the server
    free: float = 0.0  # when all that waits for the link will have left

    async def carry(self, pipe: Connection, doors: int) -> None:
        servers = [
            await asyncio.start_server(self._connected, "127.0.0.1", 0) for _ in range(doors)
        ]
        pipe.send([server.sockets[0].getsockname()[1] for server in servers])
        await asyncio.Event().wait()

    async def _connected(
        self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        opened = time.monotonic() + 2 * DELAY  # a handshake takes a round trip
        server, to_server = await asyncio.open_connection("127.0.0.1", self.port)

        async def ask() -> None:
            while data := await client.read(_CHUNK):
                await _until(max(opened, time.monotonic()) + DELAY)
                to_server.write(data)

        parts = [asyncio.create_task(ask()), asyncio.create_task(self._answer(server, to_client))]
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        to_client.close()
        to_server.close()

    async def _answer(self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        window, under_way, room = SLOW_START or WINDOW, 0, asyncio.Event()
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        def acknowledged(count: int) -> None:
            nonlocal window, under_way
            window, under_way = min(WINDOW, window + count), under_way - count
            room.set()

        async def arrive() -> None:
            while True:
                at, data = await line.get()
                await _until(at)
                to_client.write(data)
                await to_client.drain()
                asyncio.get_running_loop().call_later(DELAY, acknowledged, len(data))
                line.task_done()

        arriving = asyncio.create_task(arrive())
        try:
            while True:
                while under_way >= window:
                    room.clear()
                    await room.wait()
                await _until(self.free - QUEUE)
                data = await server.read(min(_CHUNK, window - under_way))
                if not data:
                    break
                self.free = max(time.monotonic(), self.free) + len(data) / RATE
                under_way += len(data)
                line.put_nowait((self.free + DELAY, data))
            await line.join()
        finally:
            arriving.cancel()


async def _until(moment: float) -> None:
    if (seconds := moment - time.monotonic()) > 0:
        await asyncio.sleep(seconds)


if __name__ == "__main__":
    main()
