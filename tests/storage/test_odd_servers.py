"""Servers that redirect, limit the rate, compress, sign addresses or differ in their ETags."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import wdstrain as wt
from tests.conftest import write_tar
from tests.support.servers import (
    EXPIRED,
    Handler,
    Served,
    Signer,
    compressing,
    fine,
    lead_to,
    pooled,
    requiring_no_version,
    serving,
    small_and_quick,
    status,
)

ALWAYS = 10_000  # requests


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 320 KB with an index, which holds checksums."""
    folder = tmp_path_factory.mktemp("odd") / "set"
    wt.pack(({"__key__": f"{n:02d}", "bin": data(n)} for n in range(32)), folder, num_shards=2)
    return folder


@pytest.fixture
def bare(packed: Path, tmp_path: Path) -> Path:
    """The same shards without an index."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for shard in packed.glob("*.tar"):
        (folder / shard.name).write_bytes(shard.read_bytes())
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small_and_quick(monkeypatch, 64 << 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))


def data(number: int) -> bytes:
    return bytes([number]) * 20_000


# --- jobs that read every byte of both shards; each checks what it read ---


def load(url: str, folder: Path) -> None:
    check(wt.Loader(url, batch_size=8, tail="keep"))


def load_through_a_cache(url: str, folder: Path) -> None:
    check(wt.Loader(url, batch_size=8, tail="keep", cache_dir=folder / "cache"))


def check(loader: wt.Loader) -> None:
    with closing(loader):
        batches = list(loader.epoch(0, until=1))
    keys = [key for batch in batches for key in batch["__key__"]]
    assert sorted(keys) == [f"{n:02d}" for n in range(32)]
    for batch in batches:
        for key, content in zip(batch["__key__"], batch["bin"], strict=True):
            assert content == data(int(key))


def convert(url: str, folder: Path) -> None:
    assert len(wt.convert_tars(url, folder / "converted")) == 32
    assert wt.verify(folder / "converted").samples == 32


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
        """Redirect to an address that is good for one request."""
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
    ("code", "header", "value"),
    [
        (429, "Retry-After", "1"),
        (503, "Retry-After", "1"),
        (429, "RateLimit", '"resolvers";r=0;t=1'),
    ],
)
def test_a_wait_that_the_server_asks_for_is_no_silence(
    packed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    header: str,
    value: str,
) -> None:
    monkeypatch.setenv("WDSTRAIN_NETWORK_TIMEOUT", "0.3")
    ends: list[float] = []
    refusal = status(code, b"", **{header: value})

    def limited(handler: Handler, path: Path, start: int, stop: int) -> bool:
        ends.append(ends[0] if ends else time.monotonic() + 0.9)
        return time.monotonic() < ends[0] and refusal(handler, path, start, stop)

    with serving(packed, faults=[limited] * ALWAYS) as server:
        load(server.url, tmp_path)


def test_all_processes_of_a_machine_wait_when_one_was_refused(packed: Path, tmp_path: Path) -> None:
    times: list[float] = []

    def refuse_first(handler: Handler, path: Path, start: int, stop: int) -> bool:
        times.append(time.monotonic())
        return len(times) == 1 and status(429, Retry_After="3")(handler, path, start, stop)

    with serving(packed, faults=[refuse_first] * ALWAYS, faulty=(".json", ".tar")) as server:
        code = f"import wdstrain as wt; wt.open({server.url!r})"
        other = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        assert other.stderr is not None
        assert any("asks to wait 3 s (TemporaryError: status 429)" in line for line in other.stderr)
        other.kill()
        other.communicate()
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
        left = {"RateLimit": '"all";r=3;t=1', "RateLimit-Policy": '"all";q=30;w=60'}
        if len(times) > 1:
            left["RateLimit"] = '"all";r=29;t=60'
        handler.answer_range(path, start, stop, {"ETag": '"1"', **left})
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


@pytest.mark.parametrize("where", ["cls >= 0", "cls == 0"])
def test_ranges_grow_with_what_is_delivered(tmp_path: Path, where: str) -> None:
    """Half of the samples may be left out: they lie in gaps of the ranges, which are discarded."""
    rows = ({"__key__": f"{n:02d}", "bin": bytes([n]) * 1_000_000, "cls": n % 2} for n in range(40))
    wt.pack(rows, tmp_path / "set", num_shards=1)
    with serving(tmp_path / "set") as server:
        code = f"""if True:
            import wdstrain as wt
            with wt.Loader({server.url!r}, batch_size=4, where={where!r}, shuffle_buffer=8) as loader:
                for _ in range(3):
                    for batch in loader:
                        for key, data in zip(batch["__key__"], batch["bin"]):
                            assert data == bytes([int(key)]) * 1_000_000
        """
        environment = {k: v for k, v in os.environ.items() if k != "WDSTRAIN_RANGE_SIZE"}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        ranges = [asked.removeprefix("bytes=").split("-") for _, asked in server.requests if asked]
    sizes = [int(last) - int(first) + 1 for first, last in ranges if int(last) < 1 << 40]
    assert sizes[0] < 5_000_000
    assert 8_000_000 < max(sizes) < 36_000_000


@pytest.mark.parametrize("stated", ["", "Retry-After", "RateLimit"])
def test_a_loader_survives_the_requests_that_a_server_refuses(tmp_path: Path, stated: str) -> None:
    """Twelve requests in five seconds are allowed. Others are refused, for longer than silence lasts.

    Ranges grow meanwhile, so that few requests are needed.
    """
    rows = ({"__key__": f"{n:03d}", "bin": bytes([n]) * 1_000_000} for n in range(100))
    wt.pack(rows, tmp_path / "set", num_shards=1)
    lock, begins, count, sent, refused = threading.Lock(), [0.0], [0], list[int](), [0]

    def limiting(handler: Handler, path: Path, start: int, stop: int) -> bool:
        with lock:
            now = time.monotonic()
            if now - begins[0] > 5.0:
                begins[0], count[0] = now, 0
            count[0] += 1
            if is_allowed := count[0] <= 12:
                sent.append(stop - start)
            else:
                refused[0] += 1
        if not is_allowed:
            says = {"Retry-After": "5", "RateLimit": '"all";r=0;t=5'}
            handler.answer(429, b"", {stated: says[stated]} if stated else {})
            return True
        with open(path, "rb") as file:
            file.seek(start)
            span = {"Content-Range": f"bytes {start}-{stop - 1}/{path.stat().st_size}"}
            handler.answer(206, file.read(stop - start), span)
        return True

    with serving(tmp_path / "set", faults=[limiting] * ALWAYS) as server:
        code = f"""if True:
            import wdstrain as wt
            with wt.Loader({server.url!r}, batch_size=4, shuffle_buffer=8) as loader:
                for epoch in range(4):
                    keys = set()
                    for batch in loader.epoch(epoch, until=4):
                        for key, data in zip(batch["__key__"], batch["bin"]):
                            assert data == bytes([int(key)]) * 1_000_000
                            keys.add(key)
                    assert len(keys) == 100
        """
        unset = ("WDSTRAIN_RANGE_SIZE", "WDSTRAIN_READ_AHEAD")
        environment = {k: v for k, v in os.environ.items() if k not in unset}
        environment |= {"WDSTRAIN_RETRY_PAUSE": "0.002", "WDSTRAIN_NETWORK_TIMEOUT": "4"}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert refused[0] > 0
    assert sent[0] < 5_000_000
    assert len(sent) <= 12 + 4 * 3 + 2  # 100 with ranges of 4 MB
    assert sum(sent[-6:]) / 6 > 20e6


# --- addresses that expire ---


@pytest.fixture
def renewing() -> Iterator[Callable[[Callable[[str], str]], None]]:
    """`wt.renew_addresses` for one test."""
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
    with serving(packed, faults=[signer] * ALWAYS, faulty=(".tar", ".json", ".arrow")) as server:
        job(f"{server.url}?sig=hush-0", tmp_path)
    assert signer.expired
    assert len(signer.calls) == len(signer.expired)
    assert all(address.startswith(server.url) for address in signer.calls)


def test_each_signed_address_is_renewed_by_itself(
    packed: Path, tmp_path: Path, renewing: Callable[[Callable[[str], str]], None]
) -> None:
    signers = {path.name: Signer(uses=3) for path in packed.glob("*.tar")}

    def signed(handler: Handler, path: Path, start: int, stop: int) -> bool:
        return signers[path.name](handler, path, start, stop)

    renewing(lambda address: signers[urlsplit(address).path[1:]].renew(address))
    with serving(packed, faults=[signed] * ALWAYS) as server:
        check(
            wt.Loader(
                [f"{server.url}/{name}?sig={name}" for name in sorted(signers)],
                batch_size=8,
                tail="keep",
            )
        )
    for signer in signers.values():
        assert len(signer.calls) == len(signer.expired) > 0


def other_file(address: str) -> str:
    return f"{address.partition('?')[0]}.other?sig=hush"


def failing(address: str) -> str:
    raise RuntimeError(f"no key for {address}")


def expired_again(address: str) -> str:
    return address


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (other_file, "its renewal failed: ValueError: it returned the address of another file"),
        (failing, "its renewal failed: RuntimeError: no key for http"),
        (expired_again, "The signed address or the token has expired"),
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


# --- versions ---


@pytest.mark.parametrize("job", JOBS)
def test_a_server_that_refuses_its_own_version_is_read(
    packed: Path, tmp_path: Path, job: Job
) -> None:
    with serving(packed, faults=[requiring_no_version] * ALWAYS) as server:
        job(server.url, tmp_path)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("job", JOBS)
def test_checksums_are_believed_where_the_servers_of_a_pool_give_different_versions(
    packed: Path, tmp_path: Path, job: Job, strict: bool
) -> None:
    with serving(packed, faults=[pooled(strict=strict)] * ALWAYS) as server:
        job(server.url, tmp_path)


@pytest.mark.parametrize("strict", [False, True])
def test_without_checksums_different_versions_are_read_or_the_error_names_the_index(
    bare: Path, tmp_path: Path, strict: bool
) -> None:
    urls = f"/{sorted(bare.glob('*.tar'))[0].name}"
    with serving(bare, faults=[pooled(strict=strict)] * ALWAYS) as server:
        try:
            loader = wt.Loader(server.url + urls, batch_size=8)
            with closing(loader):
                list(loader.epoch(0, until=1))
        except wt.ShardError as error:
            said = str(error)
        else:
            said = "wdstrain index"
    assert "wdstrain index" in said


def test_an_empty_shard_is_named_as_cut(tmp_path: Path) -> None:
    """It has no first byte that a range request could bring."""
    (tmp_path / "a.tar").touch()
    empty = status(416, b"", Content_Range="bytes */0")
    with serving(tmp_path, faults=[empty] * ALWAYS) as server:
        (finding,) = wt.verify(f"{server.url}/a.tar").findings
        assert "ends at byte 0" in finding.reason
        with pytest.raises(wt.ShardError, match="ends at byte 0"):
            wt.open(f"{server.url}/a.tar")


# --- compression ---


@pytest.mark.parametrize(
    ("ranges", "indexed"),
    [
        (True, False),
        (False, False),
        (False, True),
        (True, True),
    ],
)
def test_a_compressed_shard_is_read_or_refused_as_compressed(
    packed: Path, bare: Path, tmp_path: Path, ranges: bool, indexed: bool
) -> None:
    folder = packed if indexed else bare
    urls = [f"/{shard.name}" for shard in sorted(folder.glob("*.tar"))]
    said = "gzip"
    with serving(folder, ranges=ranges, faults=[compressing] * ALWAYS) as server:
        try:
            check(wt.Loader([server.url + url for url in urls], batch_size=8, tail="keep"))
        except wt.WdstrainError as error:
            said = str(error)
    assert "gzip" in said or "compress" in said


# --- reasons ---


@pytest.mark.parametrize(
    ("code", "body", "reason"),
    [
        (
            403,
            "<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>",
            "expired",
        ),
        (
            400,
            "<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>",
            "expired",
        ),
        (
            403,
            "<Error><Code>AuthenticationFailed</Code><AuthenticationErrorDetail>Signature not "
            "valid in the specified time frame</AuthenticationErrorDetail></Error>",
            "time frame",
        ),
        (
            403,
            "<Error><Code>InvalidObjectState</Code><Message>The object is archived</Message></Error>",
            "archived",
        ),
        (401, '{"error": "token was revoked"}', "revoked"),
    ],
)
def test_the_reason_that_a_server_gives_is_in_the_error(
    packed: Path, tmp_path: Path, code: int, body: str, reason: str
) -> None:
    refused = [status(code, body.encode(), Content_Type="application/xml")] * ALWAYS
    with serving(packed, faults=[fine(), fine(), *refused]) as server:
        address = f"{server.url}?X-Amz-Expires=5&X-Amz-Signature=hush"
        with pytest.raises(wt.StorageError) as stopped:
            load(address, tmp_path)
    assert "hush" not in str(stopped.value)
    assert reason in str(stopped.value)


def test_an_address_that_expired_before_the_start_is_named_as_expired(
    packed: Path, tmp_path: Path
) -> None:
    body = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
    refused = [status(403, body, Content_Type="application/xml")] * ALWAYS
    with (
        serving(packed, faults=refused, faulty=(".tar", ".json", ".arrow")) as server,
        pytest.raises(wt.WdstrainError) as stopped,
    ):
        load(f"{server.url}?X-Amz-Expires=5&X-Amz-Signature=hush", tmp_path)
    assert "expired" in str(stopped.value)


# --- numbers of requests ---


def opened(urls: str) -> None:
    assert len(wt.open(urls)) == 32


def counted(urls: str) -> None:
    assert wt.info(urls).samples == 32


def streamed(urls: str) -> None:
    wt.stream(urls)


def sizes(served: Served) -> list[int]:
    """Return the body sizes of shards that were sent."""
    return [size for path, size in served.sent if path.endswith(".tar")]


@pytest.mark.parametrize("start", [opened, streamed, counted])
def test_a_later_start_orders_no_shard_whole(tmp_path: Path, start: Callable[[str], None]) -> None:
    """`wt.info` reads values in the first MB of a shard."""
    for n in range(2):
        samples = [(f"{16 * n + i:02d}", {"bin": bytes(200_000)}) for i in range(16)]
        write_tar(tmp_path / f"set/{n}.tar", samples)
    with serving(tmp_path / "set") as server:
        urls = server.url + "/{0..1}.tar"
        opened(urls)  # scans the headers
        server.sent.clear()
        start(urls)
        assert max(sizes(server), default=0) < 1_200_000


class Ready(list[tuple[str, str | None]]):
    """Requests of a server. complete: set when so many index files were asked for."""

    def __init__(self, starts: int) -> None:
        super().__init__()
        self.starts, self.complete = starts, threading.Event()

    def append(self, request: tuple[str, str | None]) -> None:
        super().append(request)
        if sum(path == "/index.json" for path, _ in self) == self.starts:
            self.complete.set()


def test_ranks_of_one_machine_share_one_scan_of_bare_shards(bare: Path) -> None:
    """No shard is sent before all ranks have started."""
    requests = Ready(starts=3)

    def held(handler: Handler, path: Path, start: int, stop: int) -> bool:
        assert requests.complete.wait(60)
        return False

    with serving(bare, requests=requests, faults=[held] * ALWAYS) as server:
        urls = server.url + "/train-{000000..000001}.tar"
        code = f"""if True:
            import sys, wdstrain as wt
            loader = wt.Loader({urls!r}, batch_size=4, rank=int(sys.argv[1]), world_size=3)
            print(len(loader), len(loader.index))
        """
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(n)], stdout=subprocess.PIPE, text=True
            )
            for n in range(3)
        ]
        assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["2 32\n"] * 3
    assert {rank.returncode for rank in ranks} == {0}
    scans = Counter(
        path for path, asked in requests if path.endswith(".tar") and asked != "bytes=0-0"
    )
    assert scans == {f"/train-00000{n}.tar": 1 for n in range(2)}


@pytest.mark.parametrize("start", [opened, streamed, counted])
@pytest.mark.parametrize("urls", ["/train-{000000..000001}.tar", ""])
def test_a_start_asks_for_the_index_once(
    packed: Path, start: Callable[[str], None], urls: str
) -> None:
    with serving(packed) as server:
        start(server.url + urls)
        asked = Counter(path for path, _ in server.requests)
    assert asked["/index.json"] == 1
    assert asked["/index.arrow"] == 1


def counted_exactly(urls: str) -> None:
    assert wt.info(urls, exact=True).samples == 5


def verified(urls: str) -> None:
    assert wt.verify(urls, num_workers=4).samples == 5


@pytest.mark.parametrize(
    "job",
    [
        wt.open,
        counted_exactly,
        verified,
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


# --- interrupts ---


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("words", [["info", "--exact"], ["verify"], ["plan"]])
def test_an_interrupt_does_not_wait_for_a_server_that_does_not_answer(
    bare: Path, words: list[str], is_known: bool
) -> None:
    released, asked = threading.Event(), threading.Semaphore(0)

    def stalled(handler: Handler, path: Path, start: int, stop: int) -> bool:
        asked.release()
        return released.wait(60)

    with serving(bare) as server:
        urls = server.url + "/train-{000000..000001}.tar"
        if is_known:  # its states are asked for, and compared with those of the earlier scan
            wt.open(urls)
        server.faults += [stalled] * ALWAYS
        command = [sys.executable, "-m", "wdstrain", *words, urls]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert asked.acquire(timeout=60)
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=15)  # before 20 s, when it is sent again
            finally:
                process.kill()
                released.set()
    assert process.returncode == 130
    assert "error: interrupted." in err
    assert "Traceback" not in err


# --- other ranges than requested ---


@pytest.mark.parametrize("shift", [-512, 512])
@pytest.mark.parametrize("set_of", ["packed", "bare"])
def test_a_range_that_begins_elsewhere_is_an_error_that_names_it(
    set_of: str, shift: int, request: pytest.FixtureRequest
) -> None:
    """Without checksums in an index, nothing else would tell its bytes from the right ones."""

    def shifted(handler: Handler, path: Path, start: int, stop: int) -> bool:
        if not handler.is_ranged or not start or stop + shift > path.stat().st_size:
            return False
        handler.answer_range(path, start + shift, stop + shift, {})
        return True

    with serving(request.getfixturevalue(set_of), says="nothing") as served:
        served.faults += [shifted] * ALWAYS
        with pytest.raises(wt.StorageError, match=r"range 'bytes \d+-\d+/\d+' for a request"):
            load(f"{served.url}/train-{{000000..000001}}.tar", Path())
