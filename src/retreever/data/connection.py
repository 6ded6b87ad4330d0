"""HTTP connections that always end: http and https only, few redirects, a minimum rate and a total time.

The time-out of a socket counts silence only, so a server that sends one byte now and then could hold a download for
ever, even in its headers. A thread therefore measures the rate and shuts the socket when it is too low.
"""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from threading import Event, Thread
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit

from retreever.errors import DataError

TIMEOUT = 30.0  # seconds of silence
WINDOW = 60.0  # seconds in which SLOWEST bytes a second have to come
SLOWEST = 1_000
LONGEST = 6 * 3_600.0  # seconds in all
REDIRECTS = 5
CHUNK = 2**18


class Watch:
    """Counts the bytes of a connection and shuts its sockets when they come too slowly or it takes too long."""

    def __init__(self) -> None:
        self.came = 0
        self.verdict = ""
        self.sockets: list[socket.socket] = []
        self._over = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        begin = time.monotonic()
        before = 0
        while not self._over.wait(WINDOW):
            if self.came - before < SLOWEST * WINDOW:
                self.verdict = f"fewer than {SLOWEST:,} bytes a second came in {WINDOW:g} s"
            elif time.monotonic() - begin > LONGEST:
                self.verdict = f"not done within {LONGEST:g} s"
            before = self.came
            for opened in self.sockets if self.verdict else ():
                with suppress(OSError):  # closed already
                    opened.shutdown(socket.SHUT_RDWR)


def open_address(address: str, headers: Mapping[str, str], watch: Watch) -> HTTPResponse:
    """The answer of the server at `address`, or where that redirects to. Raises `DataError` or `HTTPError`."""
    opener = urllib.request.OpenerDirector()  # without urllib's usual handlers of ftp, files and redirects
    for handler in (urllib.request.ProxyHandler(), _Handler(watch), urllib.request.HTTPErrorProcessor()):
        opener.add_handler(handler)
    opener.add_handler(urllib.request.HTTPDefaultErrorHandler())
    place = address
    for _ in range(REDIRECTS + 1):
        with trouble(address, watch):
            if urlsplit(place).scheme not in ("http", "https"):
                raise DataError(f"{address}: expected an http or https address, got {place!r}")
            request = urllib.request.Request(place, headers=dict(headers))
            try:
                answer: HTTPResponse = opener.open(request, timeout=TIMEOUT)
                return answer
            except HTTPError as error:
                if error.code not in (301, 302, 303, 307, 308) or "Location" not in error.headers:
                    raise
                error.close()
                place = urljoin(place, error.headers["Location"])
    raise DataError(f"{address}: expected at most {REDIRECTS} redirects, got more")


def pieces(answer: HTTPResponse, address: str, watch: Watch) -> Iterator[bytes]:
    """The body as it comes, at most CHUNK bytes at a time."""
    while True:
        with trouble(address, watch):
            piece = answer.read1(CHUNK)  # `read` would wait for a whole chunk
            if watch.verdict:
                raise TimeoutError
        if not piece:
            return
        watch.came += len(piece)
        yield piece


@contextmanager
def trouble(address: str, watch: Watch) -> Iterator[None]:
    """Turn network errors into `DataError`; `HTTPError`, an answer of the server, is left as it is."""
    try:
        yield
    except HTTPError:
        raise
    except (OSError, HTTPException, ValueError, OverflowError) as error:  # the last two: malformed addresses
        reason = error.reason if isinstance(error, URLError) else error
        problem = "no answer in time" if isinstance(reason, TimeoutError) else reason or type(error).__name__
        problem = watch.verdict or problem  # shut by the watch, a socket gives all kinds of errors
        raise DataError(f"{address}: cannot be reached: {problem}; run it again to go on with what came") from error


class _Handler(urllib.request.AbstractHTTPHandler):
    """Opens http and https, with sockets that the watch can shut."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_watched(HTTPConnection, self.watch), request)

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_watched(HTTPSConnection, self.watch), request)


def _watched(kind: type[HTTPConnection], watch: Watch) -> type[HTTPConnection]:
    class Watched(kind):  # type: ignore[valid-type, misc]
        def connect(self) -> None:
            super().connect()
            watch.sockets.append(self.sock)

    return Watched
