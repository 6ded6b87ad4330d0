"""Servers that send a byte now and then: given up after a while, and what came is kept."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from retreever.data import connection
from retreever.data.fetch import download
from retreever.errors import DataError

START = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that answers every request with `first`, then `again` and again; gives its address."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(first: bytes, again: bytes, pause: float) -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(10_000)
            try:
                peer.sendall(first)
                while not over.wait(pause):
                    peer.sendall(again)
            except OSError:  # given up
                pass

    threads: list[threading.Thread] = []

    def start(first: bytes, again: bytes, pause: float = 0.02) -> str:
        threads.append(threading.Thread(target=answer, args=(first, again, pause), daemon=True))
        threads[-1].start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/file"

    yield start
    over.set()
    for thread in threads:
        thread.join(5)
    listener.close()


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WINDOW", 0.3)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (START + b"begun", b"x"),
        (START.replace(b"Content-Length: 1000000", b"Transfer-Encoding: chunked"), b"0"),
        (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP", b"/"),
    ],
    ids=["body", "length of a chunk", "headers", "continue", "status"],
)
def test_a_trickle_is_given_up(serve: Serve, tmp_path: Path, first: bytes, again: bytes) -> None:
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"cannot be reached: fewer than 1,000 bytes a second came in 0.3 s; run it ag"):
        download(serve(first, again), tmp_path / "file")
    assert time.monotonic() - begin < 5 and not (tmp_path / "file").exists()
    if b"begun" in first:
        assert (tmp_path / "file.part").read_bytes().startswith(b"begunx")


def test_a_steady_stream_is_given_up_when_it_takes_too_long(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LONGEST", 0.5)
    monkeypatch.setattr(connection, "SLOWEST", 1)
    with pytest.raises(DataError, match=r"cannot be reached: not done within 0.5 s; run it again to go on"):
        download(serve(START, bytes(500)), tmp_path / "file")
    assert (tmp_path / "file.part").stat().st_size > 300


def test_a_fast_enough_stream_comes_whole(serve: Serve, tmp_path: Path) -> None:
    """Over several windows; the server goes on, but what it promised is complete."""
    address = serve(START.replace(b"1000000", b"50000"), bytes(1_000))
    assert download(address, tmp_path / "file").stat().st_size == 50_000
    assert threading.active_count() < 10
