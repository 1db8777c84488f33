"""Servers that redirect, limit the rate, compress, sign addresses or differ in their ETags."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import wdstrain as wt
from tests.conftest import write_shards, write_tar
from tests.support.children import Program
from tests.support.outcomes import result_or_refusal
from tests.support.readers import by_key
from tests.support.servers import (
    ALWAYS,
    EXPIRED,
    Handler,
    Signer,
    compressing,
    fine,
    lead_to,
    pooled,
    requiring_no_version,
    serving,
    small_and_quick,
    status,
    until,
)

TARS = "train-{000000..000001}.tar"
TAR, ALL = (".tar",), (".tar", ".json", ".arrow")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 320 KB with an index, which holds checksums."""
    folder = tmp_path_factory.mktemp("odd") / "set"
    wt.pack(({"__key__": f"{n:02d}", "bin": data(n)} for n in range(32)), folder, num_shards=2)
    return folder


@pytest.fixture
def bare(packed: Path, tmp_path: Path) -> Path:
    (tmp_path / "bare").mkdir()
    for shard in packed.glob("*.tar"):
        (tmp_path / "bare" / shard.name).write_bytes(shard.read_bytes())
    return tmp_path / "bare"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_and_quick(monkeypatch, 64 << 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))


def data(number: int, size: int = 20_000) -> bytes:
    return bytes([number]) * size


# --- addresses ---


@pytest.mark.parametrize(
    ("rest", "count"),
    [
        ("part-000.tar?name=a*b[1]", 7),
        ("part-000.tar#part.tar", 7),
        ("part-{000..001}.tar?token=1&filename=part-000.tar", 20),
        ("index.json?token=1&filename=index.json", 20),
    ],
)
def test_a_query_is_no_pattern(rest: str, count: int, tmp_path: Path) -> None:
    wt.index(write_shards(tmp_path / "set", [7, 13]))
    with serving(tmp_path / "set") as served:
        assert len(wt.open(f"{served.url}/{rest}")) == count
        if ".json" not in rest:
            assert len(list(wt.WebDataset(f"{served.url}/{rest}", shardshuffle=False))) == count


# --- jobs that read every byte of both shards; each checks what it read ---


def load(url: Any, folder: Path, **options: Any) -> None:
    with wt.Loader(url, batch_size=8, tail="keep", **options) as loader:
        values = by_key(loader.epoch(0, until=1), "bin")
    assert values == {f"{n:02d}": data(n) for n in range(32)}


def load_through_a_cache(url: str, folder: Path) -> None:
    load(url, folder, cache_dir=folder / "cache")


def convert(url: str, folder: Path) -> None:
    assert len(wt.convert_tars(url, folder / "converted")) == 32
    verify(str(folder / "converted"), folder)


def verify(url: str, folder: Path) -> None:
    done = wt.verify(url)
    assert (done.samples, done.findings) == (32, [])


Job = Callable[[str, Path], None]
JOBS: list[Job] = [load, load_through_a_cache, convert, verify]


# --- redirects ---


@pytest.mark.parametrize("job", JOBS)
def test_a_redirected_shard_is_asked_for_once_or_twice(
    packed: Path, tmp_path: Path, job: Job
) -> None:
    with (
        serving(packed) as storage,
        # not the address and port of an earlier server, which this process knows to be direct
        serving(packed, host="127.0.0.2", faults=[lead_to(storage.url)] * ALWAYS) as hub,
    ):
        job(hub.url, tmp_path)
        asked = Counter(path for path, _ in hub.requests if path.endswith(".tar"))
    assert len(asked) == 2
    assert max(asked.values()) <= 2


@pytest.mark.parametrize("job", JOBS)
def test_a_redirect_whose_target_expires_is_asked_for_again(
    packed: Path, tmp_path: Path, job: Job
) -> None:
    uses, signatures = Counter[str](), itertools.count()

    def signed(handler: Handler, path: Path, start: int, stop: int) -> bool:
        handler.answer(302, b"", {"Location": f"{storage.url}/{path.name}?sig={next(signatures)}"})
        return True

    def expiring(handler: Handler, path: Path, start: int, stop: int) -> bool:
        uses[handler.path] += 1
        return uses[handler.path] > 1 and status(403)(handler, path, start, stop)

    with (
        serving(packed, faults=[expiring] * ALWAYS) as storage,
        serving(packed, faults=[signed] * ALWAYS) as hub,
    ):
        job(hub.url, tmp_path)


# --- limits of the rate ---


@pytest.mark.parametrize(
    ("code", "header"),
    [
        (429, {"Retry-After": "1"}),
        (503, {"Retry-After": "1"}),
        (429, {"RateLimit": '"resolvers";r=0;t=1'}),
    ],
)
def test_a_wait_that_the_server_asks_for_is_no_silence(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, header: dict[str, str]
) -> None:
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "0.3")
    ends: list[float] = []

    def limited(*response: Any) -> bool:
        ends.append(ends[0] if ends else time.monotonic() + 0.9)
        return until(ends[0], status(code, b"", **header))(*response)

    with serving(packed, faults=[limited] * ALWAYS) as server:
        load(server.url, tmp_path)


def test_all_processes_of_a_machine_wait_when_one_was_refused(packed: Path, tmp_path: Path) -> None:
    times: list[float] = []

    def refuse_first(*response: Any) -> bool:
        times.append(time.monotonic())
        return len(times) == 1 and status(429, Retry_After="3")(*response)

    with serving(packed, faults=[refuse_first] * ALWAYS, faulty=(".json", ".tar")) as server:
        other = Program(
            """
            import logging, sys, wdstrain as wt
            logging.getLogger("wdstrain").addHandler(logging.StreamHandler(sys.stdout))
            wt.open(sys.argv[1])
            """,
            server.url,
        )
        assert any("asks to wait 3 s (TemporaryError: status 429)" in line for line in other.out)
        os.kill(other.pid, signal.SIGKILL)
        other.end()
        assert len(times) == 1
        load(server.url, tmp_path)
    assert times[1] - times[0] >= 2.9


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_loader_waits_for_the_next_window_when_a_quota_is_nearly_used(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_folder: bool
) -> None:
    """Without a folder for all processes, each process still waits for itself."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path if has_folder else tmp_path / "none"))
    times: list[float] = []

    def last_of_quota(handler: Handler, path: Path, start: int, stop: int) -> bool:
        times.append(time.monotonic())
        left = '"all";r=3;t=1' if len(times) == 1 else '"all";r=29;t=60'
        says = {"ETag": '"1"', "RateLimit": left, "RateLimit-Policy": '"all";q=30;w=60'}
        handler.answer_range(path, start, stop, says)
        return True

    with serving(packed, faults=[last_of_quota] * ALWAYS, faulty=(".json", ".tar")) as server:
        load(server.url, tmp_path)
    assert times[1] - times[0] >= 0.95
    assert times[2] - times[1] < 0.95


@pytest.mark.parametrize("header", ['"a";r=1e9;t=5', '"a";r=0;t=' + "9" * 30, ";r=;t=", "\xb2"])
def test_a_limit_that_cannot_be_read_is_no_limit(packed: Path, tmp_path: Path, header: str) -> None:
    def stating(handler: Handler, path: Path, start: int, stop: int) -> bool:
        handler.answer_range(path, start, stop, {"RateLimit": header, "Retry-After": "soon"})
        return True

    with serving(packed, faults=[stating] * ALWAYS) as server:
        load(server.url, tmp_path)


@pytest.mark.parametrize(("where", "count"), [("cls >= 0", 40), ("cls == 0", 20)])
def test_ranges_grow_with_what_is_delivered(
    tmp_path: Path, where: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the samples may be left out: they lie in gaps of the ranges, which are discarded."""
    monkeypatch.delenv("WDSTRAIN_RANGE_SIZE")
    rows = ({"__key__": f"{n:02d}", "bin": data(n, 1_000_000), "cls": n % 2} for n in range(40))
    wt.pack(rows, tmp_path / "set", num_shards=1)
    with (
        serving(tmp_path / "set") as server,
        wt.Loader(server.url, batch_size=4, where=where, shuffle_buffer=8) as loader,
    ):
        for number in range(3):
            keys = set()
            for batch in loader.epoch(number, until=3):
                for key, value in zip(batch["__key__"], batch["bin"], strict=True):
                    assert value == data(int(key), 1_000_000)
                    keys.add(key)
            assert len(keys) == count
        ranges = [asked.removeprefix("bytes=").split("-") for _, asked in server.requests if asked]
    sizes = [int(last) - int(first) + 1 for first, last in ranges if int(last) < 1 << 40]
    assert sizes[0] < 5_000_000
    assert 8_000_000 < max(sizes) < 36_000_000


# --- addresses that expire ---


@pytest.fixture
def renewing() -> Iterator[Callable[[Callable[[str], str]], None]]:
    yield wt.renew_addresses
    wt.renew_addresses(None)


@pytest.mark.parametrize(
    ("job", "uses"), [(load, 8), (load_through_a_cache, 2), (convert, 2), (verify, 2)]
)
def test_addresses_that_expired_are_renewed_once_for_all_files(
    packed: Path,
    tmp_path: Path,
    job: Job,
    uses: int,
    renewing: Callable[[Callable[[str], str]], None],
) -> None:
    signer = Signer(uses)
    renewing(signer.renew)
    with serving(packed, faults=[signer] * ALWAYS, faulty=ALL) as server:
        job(f"{server.url}?sig=hush-0", tmp_path)
    assert signer.expired
    assert len(signer.calls) == len(signer.expired)
    assert all(address.startswith(server.url) for address in signer.calls)


def test_each_signed_address_is_renewed_by_itself(
    packed: Path, tmp_path: Path, renewing: Callable[[Callable[[str], str]], None]
) -> None:
    signers = {path.name: Signer(uses=3) for path in sorted(packed.glob("*.tar"))}

    def signed(handler: Handler, path: Path, start: int, stop: int) -> bool:
        return signers[path.name](handler, path, start, stop)

    renewing(lambda address: signers[urlsplit(address).path[1:]].renew(address))
    with serving(packed, faults=[signed] * ALWAYS) as server:
        load([f"{server.url}/{name}?sig={name}" for name in signers], tmp_path)
    for signer in signers.values():
        assert len(signer.calls) == len(signer.expired) > 0


def other_file(address: str) -> str:
    return f"{address.partition('?')[0]}.other?sig=hush"


def failing(address: str) -> str:
    raise RuntimeError(f"no key for {address}")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (other_file, "its renewal failed: ValueError: it returned the address of another file"),
        (failing, "its renewal failed: RuntimeError: no key for http"),
        (str, "The signed address or the token has expired"),  # the same address
    ],
)
def test_a_renewal_that_fails_is_an_error_without_secrets(
    packed: Path,
    tmp_path: Path,
    function: Callable[[str], str],
    words: str,
    renewing: Callable[[Callable[[str], str]], None],
) -> None:
    renewing(function)
    with (
        serving(packed, faults=[status(403, EXPIRED)] * ALWAYS) as server,
        pytest.raises(wt.StorageError, match=words) as stopped,
    ):
        load(f"{server.url}?sig=hush", tmp_path)
    assert "hush" not in str(stopped.value)


@pytest.mark.parametrize(
    ("faulty", "code", "body", "reason"),
    [
        (ALL, 403, EXPIRED, "expired"),  # before the start
        (TAR, 403, EXPIRED, "expired"),
        (
            TAR,
            400,
            b"<Code>ExpiredToken</Code><Message>The token has expired.</Message>",
            "expired",
        ),
        (
            TAR,
            403,
            b"<Code>AuthenticationFailed</Code><AuthenticationErrorDetail>not in the time frame</AuthenticationErrorDetail>",
            "time frame",
        ),
        (TAR, 403, b"<Code>InvalidObjectState</Code><Message>It is archived</Message>", "archived"),
        (TAR, 401, b'{"error": "token was revoked"}', "revoked"),
    ],
)
def test_the_reason_that_a_server_gives_is_in_the_error(
    packed: Path, tmp_path: Path, faulty: tuple[str, ...], code: int, body: bytes, reason: str
) -> None:
    refused = [status(code, body, Content_Type="application/xml")] * ALWAYS
    first = [] if faulty == ALL else [fine(), fine()]
    with (
        serving(packed, faults=first + refused, faulty=faulty) as server,
        pytest.raises(wt.WdstrainError, match=reason) as stopped,
    ):
        load(f"{server.url}?X-Amz-Expires=5&X-Amz-Signature=hush", tmp_path)
    assert isinstance(stopped.value, wt.StorageError) or faulty == ALL
    assert "hush" not in str(stopped.value)


# --- versions ---


@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("job", JOBS)
def test_checksums_are_believed_where_versions_differ_or_are_refused(
    packed: Path, tmp_path: Path, job: Job, strict: bool | None
) -> None:
    """strict: of a pool of servers; None for a server that refuses its own version."""
    fault = requiring_no_version if strict is None else pooled(strict=strict)
    with serving(packed, faults=[fault] * ALWAYS) as server:
        job(server.url, tmp_path)


@pytest.mark.parametrize("strict", [False, True])
def test_without_checksums_different_versions_are_read_or_the_error_names_the_index(
    bare: Path, tmp_path: Path, strict: bool
) -> None:
    with serving(bare, faults=[pooled(strict=strict)] * ALWAYS) as server:
        said = result_or_refusal(lambda: load(f"{server.url}/{TARS}", tmp_path))
    assert said is None or "wdstrain index" in said


def test_an_empty_shard_is_named_as_cut(tmp_path: Path) -> None:
    (tmp_path / "a.tar").touch()
    empty = status(416, b"", Content_Range="bytes */0")
    with serving(tmp_path, faults=[empty] * ALWAYS) as server:
        (finding,) = wt.verify(f"{server.url}/a.tar").findings
        assert "ends at byte 0" in finding.reason
        with pytest.raises(wt.ShardError, match="ends at byte 0"):
            wt.open(f"{server.url}/a.tar")


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("set_of", ["packed", "bare"])
def test_a_compressed_shard_is_read_or_refused_as_compressed(
    tmp_path: Path, ranges: bool, set_of: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(set_of)
    with serving(folder, ranges=ranges, faults=[compressing] * ALWAYS) as server:
        urls = [f"{server.url}/train-00000{n}.tar" for n in range(2)]
        said = result_or_refusal(lambda: load(urls, tmp_path))
    assert said is None or "gzip" in said or "compress" in said


@pytest.mark.parametrize("shift", [-512, 512])
@pytest.mark.parametrize("set_of", ["packed", "bare"])
def test_a_range_that_begins_elsewhere_is_an_error_that_names_it(
    set_of: str, shift: int, request: pytest.FixtureRequest
) -> None:
    def shifted(handler: Handler, path: Path, start: int, stop: int) -> bool:
        if not handler.is_ranged or not start or stop + shift > path.stat().st_size:
            return False
        handler.answer_range(path, start + shift, stop + shift, {})
        return True

    folder = request.getfixturevalue(set_of)
    with (
        serving(folder, says="nothing", faults=[shifted] * ALWAYS) as served,
        pytest.raises(wt.StorageError, match=r"range 'bytes \d+-\d+/\d+' for a request"),
    ):
        load(f"{served.url}/{TARS}", Path())


# --- numbers of requests ---


def opened(urls: str) -> None:
    assert len(wt.open(urls)) == 32


def counted(urls: str) -> None:
    assert wt.info(urls).samples == 32


@pytest.mark.parametrize("start", [opened, wt.stream, counted])
def test_a_later_start_orders_no_shard_whole(
    tmp_path: Path, start: Callable[[str], object]
) -> None:
    """`wt.info` reads values in the first MB of a shard."""
    for n in range(2):
        samples = [(f"{16 * n + i:02d}", {"bin": bytes(200_000)}) for i in range(16)]
        write_tar(tmp_path / f"set/{n}.tar", samples)
    with serving(tmp_path / "set") as server:
        urls = server.url + "/{0..1}.tar"
        opened(urls)  # scans the headers
        server.sent.clear()
        start(urls)
        sizes = [size for path, size in server.sent if path.endswith(".tar")]
        assert max(sizes, default=0) < 1_200_000


@pytest.mark.parametrize(
    "job",
    [
        wt.open,
        lambda urls: wt.info(urls, exact=True),
        lambda urls: wt.verify(urls, num_workers=4),
    ],
)
def test_a_loop_over_bare_shards_sends_requests_to_several_at_a_time(
    tmp_path: Path, job: Callable[[str], object]
) -> None:
    for n in range(5):
        write_tar(tmp_path / f"set/{n}.tar", [(str(n), {"bin": data(n)})])
    with serving(tmp_path / "set", delay=0.01) as server:
        job(server.url + "/{0..4}.tar")
        assert server.most >= 2


@pytest.mark.parametrize("words", [["verify"], ["plan"]])
def test_an_interrupt_does_not_wait_for_a_server_that_does_not_answer(
    bare: Path, words: list[str]
) -> None:
    released, asked = threading.Event(), threading.Semaphore(0)

    def stalled(*_: Any) -> bool:
        asked.release()
        return released.wait(60)

    with serving(bare) as server:
        server.faults += [stalled] * ALWAYS
        run = "import sys; from wdstrain.cli import main; sys.exit(main(sys.argv[1:]))"
        command = Program(run, *words, f"{server.url}/{TARS}")
        assert asked.acquire(timeout=60)
        os.kill(command.pid, signal.SIGINT)
        begun = time.monotonic()
        ended = command.end()
        seconds = time.monotonic() - begun
        released.set()
    assert ended.status == 130
    assert seconds < 15
    assert "error: interrupted." in ended.err
    assert "Traceback" not in ended.err
