"""`wdstrain serve`, attacked: a real server process holds, serves others meanwhile, and its memory and threads stay bounded."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

MB = 1 << 20
SECRET = b"the secret"
STRANGE = [
    "a\r\nSet-Cookie: x=1\r\n\r\n.tar",
    "<script>alert(1)<!--.tar",
    '"onload="x.tar',
    "javascript:x",
    "&lt;b&gt;.tar",
]


@dataclass
class Attacked:
    """A server process of its own, which says nothing but its address."""

    pid: int
    port: int
    folder: Path

    def plug(self, *, room: int | None = None) -> socket.socket:
        """A bare connection. room: bytes that its side holds unread."""
        plugged = socket.socket()
        plugged.settimeout(30)
        if room:
            plugged.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        try:
            plugged.connect(("127.0.0.1", self.port))
        except BaseException:
            plugged.close()
            raise
        return plugged

    def say(self, words: bytes) -> bytes:
        """All that is answered to these words, until the server ends the connection. Some may stay unsent."""
        with self.plug() as plugged:
            with contextlib.suppress(ConnectionError):
                plugged.sendall(words)
                plugged.shutdown(socket.SHUT_WR)
            return rest_of(plugged)

    def serves(self) -> bool:
        """Whether somebody else gets what he asks for."""
        return self.say(asked("/a.tar", "Range: bytes=3-6", "Connection: close")).endswith(
            b"\r\n\r\n3456"
        )

    @property
    def memory(self) -> int:
        """Bytes that are its own."""
        found = re.search(
            r"Pss_Anon: +(\d+) kB", Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        )
        assert found
        return int(found[1]) << 10

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    @property
    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def asked(target: str | bytes, *headers: str, method: str = "GET") -> bytes:
    name = target if isinstance(target, bytes) else target.encode()
    return b"\r\n".join(
        [
            method.encode() + b" " + name + b" HTTP/1.1",
            b"Host: x",
            *(one.encode() for one in headers),
            b"",
            b"",
        ]
    )


def rest_of(plugged: socket.socket) -> bytes:
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := plugged.recv(1 << 20):
            found += data
    return bytes(found)


def answers(found: bytes) -> list[int]:
    """The statuses of the answers that came over a connection."""
    return [int(one) for one in re.findall(rb"HTTP/1\.1 (\d{3}) ", found)]


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with traps among them, and a secret beside them."""
    root = tmp_path_factory.mktemp("attacked")
    shards = root / "shards"
    (shards / "sub").mkdir(parents=True)
    (shards / ".git").mkdir()
    for place in (
        root / "secret.tar",
        shards / ".secret.tar",
        shards / ".git" / "secret.tar",
        shards / "inner.tar",
    ):
        place.write_bytes(SECRET)
    (shards / "a.tar").write_bytes(b"0123456789" * 100)
    (shards / "sub" / "b.tar").write_bytes(b"b")
    with open(shards / "large.tar", "wb") as file:
        file.truncate(64 * MB)
    for name in STRANGE:
        (shards / name).write_bytes(b"strange")
    (shards / "d\r\nX: y").mkdir()
    (shards / "far.tar").symlink_to("../secret.tar")
    (shards / "up").symlink_to("..")
    (shards / "root").symlink_to("/")
    (shards / "loop").symlink_to("loop")
    (shards / "self").symlink_to(".")
    (shards / "zero").symlink_to("/dev/zero")
    os.mkfifo(shards / "pipe.tar")
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.getcwd()
        os.chdir(shards)  # the path of a socket is short
        try:
            listening.bind("socket.tar")
        finally:
            os.chdir(here)
    return shards


@contextmanager
def serving(folder: Path, files: int | None = None) -> Iterator[Attacked]:
    """A server that has ended well and said nothing when it is left. files: descriptors that it may have."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    command = [sys.executable, "-m", "wdstrain", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limit
    ) as process:
        try:
            assert process.stderr is not None
            found = re.search(r":(\d+)/ ", process.stderr.readline())
            assert found
            yield Attacked(process.pid, int(found[1]), folder)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
            assert (process.returncode, said) == (0, "")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Attacked]:
    with serving(folder) as running:
        yield running


# --- names -----------------------------------------------------------------------------------------------------------


def climbs() -> list[bytes]:
    """Ways out of a folder, by every spelling of dots and separators that some server has fallen for."""
    dots = [
        b"..",
        b"%2e%2e",
        b".%2e",
        b"%252e%252e",
        b"%c0%ae%c0%ae",
        b"%e0%80%ae%e0%80%ae",
        b"%uff0e%uff0e",
        b"\xef\xbc\x8e\xef\xbc\x8e",
    ]
    dots += [
        b"..%00",
        b"%00..",
        b"..;",
        b"...",
        b"%2e%2e%20",
        b"..%09",
        b".%0a.",
        b"%%32%65%%32%65",
    ]
    between = [
        b"/",
        b"%2f",
        b"%2F",
        b"\\",
        b"%5c",
        b"%252f",
        b"%255c",
        b"%c0%af",
        b"%c1%9c",
        b"%e0%80%af",
        b"//",
        b"/./",
        b"%u2215",
    ]
    ends = [b"secret.tar", b"etc/passwd", b"proc/self/environ"]
    begins = [
        b"/",
        b"//",
        b"/sub/",
        b"/self/",
        b"/up/",
        b"/%2f",
        b"/C:",
        b"file:///",
        b"http://x/",
        b"\\",
        b"",
    ]
    found = [
        begin + between_.join([*[dot] * depth, end.replace(b"/", between_)])
        for begin, dot, between_, depth, end in itertools.product(
            begins, dots, between, (1, 2, 12), ends
        )
    ]
    odd = [
        b"/.git/secret.tar",
        b"/.secret.tar",
        b"/%2egit/secret.tar",
        b"/up/secret.tar",
        b"/far.tar",
        b"/root/etc/passwd",
        b"/zero",
    ]
    odd += [
        b"/pipe.tar",
        b"/socket.tar",
        b"/loop",
        b"/loop/a.tar",
        b"/" + b"x" * 60_000,
        b"/" + b"../" * 10_000 + b"etc/passwd",
    ]
    odd += [
        b"/" + b"a/" * 10_000,
        b"/" + b"self/" * 900 + b"../secret.tar",
        b"/a.tar%00.json",
        b"/a.tar%0d%0aX:%20y",
        b"/%",
        b"/%zz",
    ]
    return found + odd


def test_no_spelling_of_a_name_leads_out_of_the_folder(server: Attacked) -> None:
    targets = climbs()
    assert len(targets) > 20_000
    for at in range(0, len(targets), 2000):
        part = targets[at : at + 2000]
        found = server.say(
            b"".join(
                asked(one, "If-None-Match: *", method="GET") for one in part if len(one) < 50_000
            )
        )
        assert set(answers(found)) <= {400, 404}
        assert SECRET not in found
        assert b"root:" not in found
        assert b"PATH=" not in found
    for target in (one for one in targets if len(one) >= 10_000):
        assert answers(server.say(asked(target)))[0] in (400, 404, 414)


def test_a_way_through_links_within_the_folder_has_an_end(server: Attacked) -> None:
    assert server.say(asked("/self/self/self/sub/b.tar")).endswith(b"\r\n\r\nb")
    assert answers(server.say(asked("/" + "self/" * 700 + "a.tar"))) == [200]
    assert answers(server.say(asked("/" + "self/" * 3000 + "a.tar"))) == [404]


def test_a_link_that_changes_while_it_is_asked_for_gives_nothing_from_outside(
    folder: Path, server: Attacked
) -> None:
    over = threading.Event()
    (folder / "race").mkdir()

    def change() -> None:
        targets = itertools.cycle([folder / "sub", folder.parent])
        names = [folder / ".one", folder / ".two"]
        for target, name in zip(targets, itertools.cycle(names), strict=False):
            name.symlink_to(target)
            name.replace(folder / "race" / "link")
            if over.is_set():
                return

    changing = threading.Thread(target=change)
    changing.start()
    try:
        seen = set()
        for _ in range(20):
            found = server.say(asked("/race/link/secret.tar") * 50 + asked("/race/link/b.tar") * 50)
            assert SECRET not in found
            seen |= set(answers(found))
    finally:
        over.set()
        changing.join()
    assert seen == {200, 404}  # and it was there in between


class Links(HTMLParser):
    """Tags of a page, and where its links lead."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert [name for name, _ in attrs] in ([], ["href"])
        self.links += [value or "" for _, value in attrs]


def test_names_of_files_are_only_names_in_pages_and_heads(server: Attacked) -> None:
    found = server.say(asked("/", "Connection: close"))
    head, _, body = found.partition(b"\r\n\r\n")
    assert b"Cookie" not in head
    page = Links(body)
    assert page.tags <= {"title", "h1", "ul", "li", "a"}
    assert all(one.startswith(("./", "../")) for one in page.links)
    strange = [
        one
        for one in page.links
        if server.say(asked("/" + one.removeprefix("./"))).endswith(b"\r\n\r\nstrange")
    ]
    assert len(strange) == len(STRANGE)
    moved = server.say(asked("/d%0D%0AX%3A%20y", "Connection: close"))
    assert b"\r\nLocation: /d%0D%0AX%3A%20y/\r\n" in moved
    assert b"\nX:" not in moved


# --- words -----------------------------------------------------------------------------------------------------------

INNER = asked("/inner.tar")


@pytest.mark.parametrize(
    "head",
    [
        *(
            "Content-Length: 0\r\nContent-Length: {n}",
            "Content-Length: {n}\r\nContent-Length: 0",
            "Content-Length: {n}, 0",
        ),
        *(
            "Content-Length: {n}\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 0",
        ),
        *(
            "Transfer-Encoding: identity",
            "Transfer-Encoding: xchunked",
            "transfer-encoding:\tCHUNKED",
            "TRANSFER-ENCODING:chunked",
        ),
        *(
            "Transfer-Encoding : chunked",
            "Content-Length : {n}",
            "Content-Length\t: {n}",
            " Content-Length: {n}",
        ),
        *(
            "X: y\r\n\tz\r\nContent-Length: {n}",
            "Transfer-Encoding:\r\n chunked",
            "Content-Length:\r\n {n}",
            "X: y\rContent-Length: {n}",
        ),
        *(
            "X: y\r\r\nContent-Length: {n}",
            "nonsense\r\nContent-Length: {n}",
            ": y\r\nContent-Length: {n}",
            "X\r\nContent-Length: {n}",
        ),
        *(
            "X\0: y\r\nContent-Length: {n}",
            "Content-Length\0: {n}",
            "Content_Length: {n}\r\nContent-Length: {n}",
            "\x0bContent-Length: {n}",
        ),
        *(
            "Content-Length: +{n}",
            "Content-Length: -{n}",
            "Content-Length: 0x1f",
            "Content-Length: {n}.0",
            "Content-Length: 0{n}",
        ),
        *(
            "Content-Length:",
            "Content-Length: ,",
            "Content-Length: 99999999999999999999",
            "Expect: 100-continue\r\nContent-Length: {n}",
        ),
        *(
            "Content-Length: {n}\nX: y",
            "X: y\nContent-Length: {n}",
            "Transfer-Encoding: chunked\nX: y",
            "\xa0Content-Length: {n}",
        ),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_no_request_is_taken_out_of_the_body_of_another(
    server: Attacked, method: str, head: str
) -> None:
    head = head.replace("{n}", str(len(INNER)))
    words = f"{method} /a.tar HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode("latin-1")
    for body in (INNER, b"0\r\n\r\n" + INNER, b"%x\r\n" % len(INNER) + INNER + b"\r\n0\r\n\r\n"):
        found = server.say(words + body)
        assert len(answers(found)) == 1
        assert SECRET not in found


@pytest.mark.parametrize(
    "text",
    [
        *(
            "bytes=0-99999999999999999999999",
            "bytes=99999999999999999999999-",
            "bytes=-99999999999999999999999",
            "bytes=18446744073709551615-",
        ),
        *(
            "bytes=-0",
            "bytes=--1",
            "bytes=5-3",
            "bytes=0x1-2",
            "bytes=1e3-",
            "bytes=\xb2-\xb3",
            "bytes=+1-2",
            "bytes= 1 - 2",
            "bytes=1-2-3",
        ),
        *(
            "bytes=0-,0-",
            "bytes=0-0,-1",
            "bytes=" + ",".join(["0-"] * 10_000),
            "bytes=" + ",".join(f"{n}-" for n in range(5000)),
        ),
        *(
            "bytes=" + "0" * 60_000 + "-",
            "bytes=1-" + "9" * 60_000,
            "lines=1-2",
            "bytes=",
            "bytes",
            "=",
        ),
    ],
)
def test_no_range_gives_more_than_the_file(server: Attacked, text: str) -> None:
    found = server.say(f"GET /a.tar HTTP/1.1\r\nHost: x\r\nRange: {text}\r\n\r\n".encode("latin-1"))
    assert answers(found) in ([200], [206], [416])
    assert len(found) < 1000 + 500


def test_ten_thousand_requests_at_once_are_answered_in_turn(server: Attacked) -> None:
    with server.plug() as plugged:
        count = 10_000
        sending = threading.Thread(
            target=plugged.sendall, args=(asked("/a.tar", "Range: bytes=7-7") * count,)
        )
        sending.start()
        found = 0
        while found < count:
            data = plugged.recv(1 << 20)
            assert data
            found += data.count(b"\r\n\r\n7")  # at worst cut in two, once in a while
            count -= data.endswith((b"\r", b"\r\n", b"\r\n\r", b"\r\n\r\n"))
        sending.join()


def test_any_nonsense_is_answered_or_refused_and_nothing_is_said_of_it(server: Attacked) -> None:
    rng = random.Random(0)
    parts = [
        b"GET",
        b"HEAD",
        b"CONNECT",
        b" ",
        b"/",
        b"/a.tar",
        b"*",
        b"HTTP/1.1",
        b"HTTP/1.0",
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b":",
        b"Host: x",
    ]
    parts += [
        b"Range: bytes=",
        b"1-2",
        b"If-Range: ",
        b"If-Match: ",
        b'W/"',
        b"%",
        b"..",
        b"\xff",
        b"If-Modified-Since: Thu, 99 Foo 9999 99:99:99 GMT",
    ]
    parts += [
        b"Content-Length: ",
        b"Expect: 100-continue",
        b"Upgrade: h2c",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01",
        b"Connection: ",
        b"close",
    ]
    for _ in range(1500):
        begin = rng.choice([b"", b"GET /a.tar HTTP/1.1\r\nHost: x\r\n"])
        words = (
            begin
            + b"".join(rng.choice([*parts, rng.randbytes(5)]) for _ in range(rng.randrange(1, 30)))
            + b"\r\n\r\n"
        )
        found = server.say(words)
        assert not found or answers(found)
        assert SECRET not in found
    assert server.serves()


def test_a_client_that_wants_tls_is_refused(server: Attacked) -> None:
    context = ssl.create_default_context()
    with server.plug() as plugged, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plugged, server_hostname="localhost")
    assert server.serves()


# --- floods ----------------------------------------------------------------------------------------------------------


def send_all(plugged: socket.socket, pieces: Iterator[bytes]) -> int:
    """Send until the server has enough of it; how many bytes that were."""
    count = 0
    with contextlib.suppress(OSError):
        for piece in pieces:
            plugged.sendall(piece)
            count += len(piece)
    return count


@pytest.mark.parametrize(
    "pieces",
    [
        lambda: itertools.chain([b"GET /"], itertools.repeat(b"x" * MB, 1024)),
        lambda: itertools.chain(
            [b"GET /a.tar HTTP/1.1\r\nHost: x\r\nX: "], itertools.repeat(b"y" * MB, 1024)
        ),
        lambda: itertools.chain(
            [b"GET /a.tar HTTP/1.1\r\nHost: x\r\n"], itertools.repeat(b"X: y\r\n" * 100_000, 1024)
        ),
        lambda: itertools.chain(
            [b"GET /a.tar HTTP/1.1\r\nHost: x\r\nX: "], itertools.repeat(b"y\r\n " * 100_000, 1024)
        ),
        lambda: itertools.chain(
            [b"PUT /a.tar HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"],
            itertools.repeat(bytes(MB), 1024),
        ),
    ],
    ids=["a path", "a header", "headers", "a header in lines", "a body"],
)
def test_a_gigabyte_of_words_is_refused_in_a_moment_and_takes_no_memory(
    server: Attacked, pieces: Callable[[], Iterator[bytes]]
) -> None:
    server.serves()
    before = server.memory
    with server.plug() as plugged:
        sending = threading.Thread(target=send_all, args=(plugged, pieces()))
        sending.start()
        assert plugged.recv(12) in (b"HTTP/1.1 414", b"HTTP/1.1 431", b"HTTP/1.1 405")
        assert server.serves()
        sending.join(30)
        assert not sending.is_alive()
    assert server.memory < before + 8 * MB


@contextmanager
def crowd(
    server: Attacked, count: int, words: bytes, *, room: int | None = None
) -> Iterator[list[socket.socket]]:
    """So many clients that say this and nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(stack.enter_context(server.plug(room=room)))
            with contextlib.suppress(ConnectionError):
                found[-1].sendall(words)
        yield found


def test_headers_of_many_megabytes_are_not_kept(server: Attacked) -> None:
    words = b"GET /a.tar HTTP/1.1\r\nHost: x\r\n" + b"".join(
        b"X-%d: " % n + b"y" * 60_000 + b"\r\n" for n in range(95)
    )
    server.serves()
    before, refused = server.memory, 0
    with ExitStack() as stack:
        for _ in range(20):
            plugged = stack.enter_context(server.plug())
            with contextlib.suppress(ConnectionError):
                plugged.sendall(words)
            with contextlib.suppress(ConnectionError):  # it may be reset while it says so
                refused += plugged.recv(12) == b"HTTP/1.1 431"
        assert server.memory < before + 16 * MB  # 5.7 MB of each would be 114
    assert refused > 0


HALF = b"GET /a.tar HTTP/1.1\r\nHost: x\r\n" + b"".join(
    b"X-%03d: " % n + b"y" * 600 + b"\r\n" for n in range(95)
)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("words", "room"),
    [
        (b"", None),
        (b"GET /a.tar HTTP/1.1\r\nHost: x\r\nX: ", None),
        (HALF, None),
        (asked("/large.tar"), 4096),
        (asked("/large.tar") * 500, 4096),
        (asked("/") * 500, 4096),
    ],
    ids=[
        "silent",
        "half a head",
        "57 KB of a head",
        "never reads",
        "pipelines and never reads",
        "lists and never reads",
    ],
)
def test_a_thousand_clients_that_hold_their_places_are_put_out_for_others(
    folder: Path, words: bytes, room: int | None
) -> None:
    with serving(folder) as server:
        assert server.serves()
        before = server.memory
        with crowd(server, 1100, words, room=room):
            most = 0
            for _ in range(3):
                assert server.serves()  # within the patience of this test's clients
                most = max(most, server.memory)
                assert server.threads < 500
                assert server.files < 1024
        until(lambda: server.threads < 10)
        print(f"{(most - before) / MB:.0f} MB for 480 clients")
        assert most < before + 128 * MB


@pytest.mark.slow
def test_bytes_that_come_one_by_one_do_not_keep_a_place_from_others(folder: Path) -> None:
    with serving(folder) as server, crowd(server, 600, b"GET /") as clients:
        over = threading.Event()

        def drip() -> None:
            while not over.wait(0.2):
                for one in clients:
                    with contextlib.suppress(OSError):
                        one.send(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            for _ in range(3):
                assert server.serves()
        finally:
            over.set()
            dripping.join()


def test_few_descriptors_are_fewer_places_and_no_trouble(folder: Path) -> None:
    with serving(folder, files=100) as server:
        with crowd(server, 150, asked("/a.tar", "Range: bytes=0-0")) as clients:
            for one in clients[:10]:
                one.recv(1)
            for _ in range(20):
                assert server.serves()
            assert server.files < 100
        until(lambda: server.threads < 10)
