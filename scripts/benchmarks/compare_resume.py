"""Samples that come again or are lost when a job stops within an epoch and goes on, by library.

    python scripts/benchmarks/compare_resume.py [--only NAME ...] [--python NAME=PATH ...] [--json]

Each library reads 960 numbers in a format of its own, shuffled, in batches of 24 of all ranks together. A job stops after
15 of the 40 steps and saves its state as the documentation of the library says; webdataset has none. A new job loads the
state, with the same or with other numbers of ranks and workers, and reads to the end of the epoch. Both jobs together are
compared with an epoch that nobody stopped.

Each rank is a process, with the environment that torchrun gives it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from record import Record
from torch.utils.data import DataLoader

SAMPLES, GLOBAL_BATCH, STOP = 960, 24, 15
PATIENCE = 120  # seconds until a job is given up


class Job(NamedTuple):
    """The ranks of a job and the worker processes of each."""

    ranks: int = 1
    workers: int = 2


class Rank(NamedTuple):
    """One process of a job: where its data are, and its sizes."""

    folder: str
    rank: int
    ranks: int
    workers: int
    batch: int


JOBS = {
    "the same job": (Job(), Job()),
    "3 workers for 2": (Job(), Job(workers=3)),
    "2 ranks for 1": (Job(), Job(ranks=2)),
    "1 rank for 2": (Job(ranks=2), Job()),
}
Steps = Iterator[tuple[list[int], Any]]  # numbers of a batch, and the state after it


# --- libraries: (samples of a rank from a state on, and how their data are made) -----------------------------------------


def own_loader(job: Rank, state: Any, urls: Any = "train", **options: Any) -> Steps:
    wt = import_module("wdstrain")
    sizes = {"batch_size": job.batch, "rank": job.rank, "world_size": job.ranks, "lanes": 2}
    make = wt.mix if isinstance(urls, dict) else wt.Loader
    urls = (
        {n: f"{job.folder}/{u}" for n, u in urls.items()}
        if isinstance(urls, dict)
        else f"{job.folder}/{urls}"
    )
    with make(urls, transform=_number, num_workers=job.workers, **sizes, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            yield batch["n"].tolist(), loader.state_dict()


def _number(sample: dict[str, Any]) -> dict[str, int]:
    return {"n": int(sample["cls"])}


def own_prepare(folder: str) -> None:
    wt = import_module("wdstrain")
    samples = [{"__key__": f"{n:06d}", "cls": n} for n in range(SAMPLES)]
    wt.pack(samples, f"{folder}/train", max_shard_samples=120, shuffle=False)
    wt.pack(samples[: SAMPLES // 4], f"{folder}/other", max_shard_samples=60, shuffle=False)


def wds(job: Rank, state: Any) -> Steps:
    webdataset = import_module("webdataset")
    tars = sorted(map(str, Path(job.folder, "train").glob("*.tar")))
    split = webdataset.split_by_node
    data = webdataset.WebDataset(tars, shardshuffle=8, nodesplitter=split, seed=1).shuffle(100)
    data = data.to_tuple("cls").map_tuple(int).batched(job.batch, partial=False)
    for (numbers,) in webdataset.WebLoader(data, batch_size=None, num_workers=job.workers):
        yield torch.as_tensor(numbers).tolist(), None


def mosaic(job: Rank, state: Any) -> Steps:
    streaming = import_module("streaming")
    data = streaming.StreamingDataset(
        local=f"{job.folder}/mds",
        shuffle=True,
        batch_size=job.batch,
        shuffle_seed=1,
        num_canonical_nodes=2,
    )
    loader = streaming.StreamingDataLoader(data, batch_size=job.batch, num_workers=job.workers)
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        yield batch["n"].tolist(), loader.state_dict()


def mosaic_prepare(folder: str) -> None:
    streaming = import_module("streaming")
    with streaming.MDSWriter(out=f"{folder}/mds", columns={"n": "int"}, size_limit=2000) as out:
        for n in range(SAMPLES):
            out.write({"n": n})


def litdata(job: Rank, state: Any) -> Steps:
    lit = import_module("litdata")
    data = lit.StreamingDataset(f"{job.folder}/lit", shuffle=True, drop_last=True, seed=1)
    loader = lit.StreamingDataLoader(
        data, batch_size=job.batch, num_workers=job.workers, shuffle=True
    )
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        yield batch["n"].tolist(), loader.state_dict()


def _as_dict(n: int) -> dict[str, int]:
    return {"n": n}


def litdata_prepare(folder: str) -> None:
    import_module("litdata").optimize(
        fn=_as_dict,
        inputs=list(range(SAMPLES)),
        output_dir=f"{folder}/lit",
        chunk_size=60,
        num_workers=1,
    )


def hugging_face(job: Rank, state: Any, workers: int | None = None) -> Steps:
    datasets = import_module("datasets")
    files = sorted(map(str, Path(job.folder).glob("*.parquet")))
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = data.shuffle(seed=1, buffer_size=100)
    data = import_module("datasets.distributed").split_dataset_by_node(data, job.rank, job.ranks)
    job = job._replace(workers=job.workers if workers is None else workers)
    yield from _stateful(data.with_format("torch"), job, state)


def hugging_face_prepare(folder: str) -> None:
    for first in range(0, SAMPLES, SAMPLES // 12):
        data = {"n": list(range(first, first + SAMPLES // 12))}
        import_module("datasets").Dataset.from_dict(data).to_parquet(f"{folder}/{first:04}.parquet")


def torchdata(job: Rank, state: Any) -> Steps:
    samplers = import_module("torchdata.stateful_dataloader.sampler")
    data = [{"n": n} for n in range(SAMPLES)]
    sampler = samplers.StatefulDistributedSampler(data, job.ranks, job.rank, shuffle=True, seed=1)
    yield from _stateful(data, job, state, sampler=sampler)


def _stateful(data: Any, job: Rank, state: Any, **options: Any) -> Steps:
    loaders = import_module("torchdata.stateful_dataloader")
    loader: DataLoader[Any] = loaders.StatefulDataLoader(
        data, batch_size=job.batch, num_workers=job.workers, drop_last=True, **options
    )
    if state is not None:
        loader.load_state_dict(state)  # type: ignore[attr-defined]
    for batch in loader:
        yield batch["n"].tolist(), loader.state_dict()  # type: ignore[attr-defined]


class Library(NamedTuple):
    """How a library reads and prepares the numbers. package: whose version is recorded."""

    read: Callable[..., Steps]
    package: str
    prepare: Callable[[str], None] = own_prepare
    options: Mapping[str, Any] = MappingProxyType({})


LIBRARIES = {
    "wdstrain": Library(own_loader, "wdstrain"),
    "wdstrain, a mixture": Library(
        own_loader,
        "wdstrain",
        options={"urls": {"a": "train", "b": "other"}, "weights": {"a": 2, "b": 1}},
    ),
    "wdstrain, a filter": Library(own_loader, "wdstrain", options={"where": "cls % 5 != 0"}),
    "wdstrain, weights": Library(
        own_loader, "wdstrain", options={"weights": [n % 4 for n in range(SAMPLES)]}
    ),
    "webdataset": Library(wds, "webdataset"),
    "MosaicML Streaming": Library(mosaic, "mosaicml-streaming", mosaic_prepare),
    "LitData": Library(litdata, "litdata", litdata_prepare),
    "Hugging Face datasets": Library(hugging_face, "datasets", hugging_face_prepare),
    "Hugging Face datasets, no workers": Library(
        hugging_face, "datasets", hugging_face_prepare, {"workers": 0}
    ),
    "torchdata": Library(torchdata, "torchdata", lambda _: None),
}


# --- jobs ----------------------------------------------------------------------------------------------------------------


def run(
    python: str, name: str, folder: str, job: Job, state: str, stop: int | None
) -> list[list[int]] | str:
    """Return the sorted numbers of each step of all ranks together, or why the job failed. state: folder of it; "": none."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    children = []
    for rank in range(job.ranks):
        own = Rank(folder, rank, job.ranks, job.workers, GLOBAL_BATCH // job.ranks)
        sizes = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": job.ranks,
            "LOCAL_WORLD_SIZE": job.ranks,
        }
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TMPDIR": folder}
        environment = {
            **os.environ,
            **{key: str(value) for key, value in (sizes | address).items()},
        }
        words = [python, __file__, "--rank", json.dumps([name, own, state, stop])]
        children.append(
            subprocess.Popen(
                words,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    try:
        outs = [child.communicate(timeout=PATIENCE) for child in children]
    except subprocess.TimeoutExpired:
        for child in children:  # with its workers
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return f"no answer within {PATIENCE} s"
    if failed := next(
        (err for child, (_, err) in zip(children, outs, strict=True) if child.returncode), ""
    ):
        return failed.strip().splitlines()[-1][:60]
    steps = [json.loads(out.splitlines()[-1]) for out, _ in outs]
    return [sorted(chain(*parts)) for parts in zip(*steps, strict=False)]


def run_rank(name: str, job: Rank, state: str, stop: int | None) -> None:
    """Read as one rank, print the numbers of its steps, and keep its state where it stops."""
    if job.ranks > 1:
        torch.distributed.init_process_group("gloo")
    saved = Path(state, f"{job.rank}.pt")
    if not saved.exists():
        saved = Path(state, "0.pt")  # a rank that was not there before
    before = (
        torch.load(saved, weights_only=False) if state and stop is None and saved.exists() else None
    )
    steps, library = [], LIBRARIES[name]
    for numbers, after in library.read(job, before, **library.options):
        steps.append(numbers)
        if len(steps) == stop:
            if after is not None:
                torch.save(after, Path(state, f"{job.rank}.pt"))
            break
    print(json.dumps(steps), flush=True)
    os._exit(0)  # workers of some libraries would be waited for


def version_of(python: str, package: str) -> str:
    """Return the version of a package that an interpreter has."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def compare(python: str, name: str, folder: str, jobs: tuple[Job, Job]) -> list[str]:
    """Return samples that came again, samples that never came, and whether the steps had the same."""
    whole = run(python, name, folder, jobs[0], "", None)
    with tempfile.TemporaryDirectory() as state:
        first = run(python, name, folder, jobs[0], state, STOP)
        second = run(python, name, folder, jobs[1], state, None)
    if wrong := next((part for part in (whole, first, second) if isinstance(part, str)), ""):
        return [wrong, "", ""]
    steps = [*first, *second]
    expected, found = Counter(chain(*whole)), Counter(chain(*steps))
    more, less = found - expected, expected - found
    return [str(more.total()), str(less.total()), "yes" if steps == whole else "no"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="interpreter of a library",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout at the end, text on stderr"
    )
    parser.add_argument("--prepare", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        name, job, state, stop = arguments.rank
        return run_rank(name, Rank(*job), state, stop)
    if arguments.prepare:
        return LIBRARIES[arguments.prepare[0]].prepare(arguments.prepare[1])
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    columns = ("library", "resumed as", "came again", "never came", "same batches")
    record = Record("A job that stops within an epoch and goes on", arguments.json, columns=columns)
    versions = dict[str, str]()
    for name in arguments.only:
        python = pythons.get(name, sys.executable)
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "TMPDIR": folder}
            subprocess.run(
                [python, __file__, "--prepare", name, folder],
                check=True,
                env=environment,
                stdout=sys.stderr,
            )
            for sizes, jobs in JOBS.items():
                if "workers" in LIBRARIES[name].options and jobs[0].workers != jobs[1].workers:
                    continue
                record.say(name, sizes, *compare(python, name, folder, jobs))
        versions[LIBRARIES[name].package] = version_of(python, LIBRARIES[name].package)
    record.end("torch", installed=versions)


if __name__ == "__main__":
    main()
