"""Fetching from a server of one's own: whole files, broken connections, wrong checksums, no connection."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from retreever.data import connection
from retreever.data import fetch as module
from retreever.data.catalogue import DATASETS
from retreever.data.fetch import download, fetch
from retreever.errors import DataError

DATA = bytes(range(256)) * 40


class Server(ThreadingHTTPServer):
    """Serves `data` at every address; can break off after some bytes, ignore ranges, lie, or answer with an error."""

    data = DATA
    break_after: int | None = None
    ranges = True
    shift = 0
    status = 0
    silent = False
    delay = 0.0
    reason = ""
    length = ""
    location = ""
    asked: list[str | None]
    daemon_threads = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/archive.zip"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append(wanted)
        if server.silent:
            threading.Event().wait(1.0)
            return
        threading.Event().wait(server.delay)
        if server.location and self.path == "/archive.zip":
            self.send_response_only(302)
            self.send_header("Location", server.location)
            return self.end_headers()
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
        if server.reason:
            return self.wfile.write(f"HTTP/1.1 404 {server.reason}\r\n\r\n".encode("latin-1"))
        if server.status:
            return self.send_error(server.status)
        if start >= len(server.data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.data)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start + server.shift}-{len(server.data) - 1}/{len(server.data)}")
        self.send_header("Content-Length", server.length or str(len(server.data) - start))
        self.end_headers()
        self.wfile.write(server.data[start:][: server.break_after])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server(("127.0.0.1", 0), Handler)
    running.asked = []
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def test_a_file_comes_whole(server: Server, tmp_path: Path) -> None:
    file = download(server.address, tmp_path / "new/file", md5(DATA))
    assert file.read_bytes() == DATA and list(file.parent.iterdir()) == [file]


def test_a_broken_connection_is_gone_on_with(server: Server, tmp_path: Path) -> None:
    """Twice: only what is missing is asked for again."""
    server.break_after = 4_000
    for got in ("4,000", "8,000"):
        with pytest.raises(DataError, match=f"got {got} of 10,240 bytes; run it again to go on"):
            download(server.address, tmp_path / "file", md5(DATA))
        assert not (tmp_path / "file").exists()
    assert download(server.address, tmp_path / "file", md5(DATA)).read_bytes() == DATA
    assert server.asked == [None, "bytes=4000-", "bytes=8000-"]


def test_a_server_that_sends_all_again_is_believed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(b"something else")
    server.ranges = False
    assert download(server.address, tmp_path / "file").read_bytes() == DATA


def test_a_server_that_sends_other_bytes_is_not(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(DATA[:100])
    server.shift = 1
    with pytest.raises(DataError, match="asked for bytes from 100, the server sent others"):
        download(server.address, tmp_path / "file")
    assert (tmp_path / "file.part").read_bytes() == DATA[:100]


def test_what_is_whole_already_is_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(DATA)
    assert download(server.address, tmp_path / "file", md5(DATA)).read_bytes() == DATA


def test_what_is_too_long_goes(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(DATA + b"x")
    with pytest.raises(DataError, match="what an earlier try left does not fit; removed"):
        download(server.address, tmp_path / "file")
    assert download(server.address, tmp_path / "file").read_bytes() == DATA


def test_a_wrong_checksum_is_named_and_the_file_goes(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"expected a file with md5 {md5(b'')}, got another; removed"):
        download(server.address, tmp_path / "file", md5(b""))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", [404, 500])
def test_an_error_of_the_server_is_one_line(server: Server, tmp_path: Path, status: int) -> None:
    server.status = status
    with pytest.raises(DataError, match=rf"^http://127\.0\.0\.1:\d+/archive.zip: the server answered {status} "):
        download(server.address, tmp_path / "file")


def test_a_silent_server_is_given_up(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TIMEOUT", 0.1)
    server.silent = True
    with pytest.raises(DataError, match="cannot be reached: no answer in time"):
        download(server.address, tmp_path / "file")


def test_without_a_server_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^http://127\.0\.0\.1:1/x: cannot be reached: .*refused"):
        download("http://127.0.0.1:1/x", tmp_path / "file")


def test_more_than_any_archive_has_is_not_taken(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGEST", 1_000)
    with pytest.raises(DataError, match="expected at most 1,000 bytes"):
        download(server.address, tmp_path / "file")


def test_redirects_are_followed(server: Server, tmp_path: Path) -> None:
    server.location = "/elsewhere"
    assert download(server.address, tmp_path / "file", md5(DATA)).read_bytes() == DATA
    server.location = server.address.replace("archive.zip", "again")
    assert download(server.address, tmp_path / "file", md5(DATA)).read_bytes() == DATA


def test_redirects_end(server: Server, tmp_path: Path) -> None:
    server.location = "/archive.zip"
    with pytest.raises(DataError, match="expected at most 5 redirects, got more"):
        download(server.address, tmp_path / "file")
    assert len(server.asked) == 6


@pytest.mark.parametrize("location", ["ftp://127.0.0.1:1/x", "file:///etc/passwd", "data:text/plain,x", "gopher://x"])
def test_only_http_and_https_are_opened(server: Server, tmp_path: Path, location: str) -> None:
    server.location = location
    for address in (server.address, location):
        with pytest.raises(DataError, match=f"^{address}: expected an http or https address, got '{location}'$"):
            download(address, tmp_path / "file")


@pytest.mark.parametrize(
    "location",
    [
        "http://[::1",
        "http://127.0.0.1:port/",
        "http://127.0.0.1:99999999999999999999/",
        "http://a..b/",
        "http://\xfc/\xfc",
    ],
)
def test_a_redirect_to_a_malformed_address_is_one_line(server: Server, tmp_path: Path, location: str) -> None:
    server.location = location
    with pytest.raises(DataError, match=f"^{server.address}: cannot be reached: ") as caught:
        download(server.address, tmp_path / "file")
    assert str(caught.value).isprintable()


def test_what_a_server_says_is_escaped_and_cut(server: Server, tmp_path: Path) -> None:
    server.reason = "\x1b[2J\x07" + "x" * 50_000
    with pytest.raises(DataError, match=r"the server answered 404 \\x1b\[2J\\x07xx") as caught:
        download(server.address, tmp_path / "file")
    assert str(caught.value).isprintable() and len(str(caught.value)) <= 2_000


def test_a_length_beyond_any_integer_is_none(server: Server, tmp_path: Path) -> None:
    server.length = "9" * 5_000
    assert download(server.address, tmp_path / "file", md5(DATA)).read_bytes() == DATA


@pytest.mark.parametrize("kept", [b"mine", None])
def test_a_linked_part_is_not_written_through(server: Server, tmp_path: Path, kept: bytes | None) -> None:
    """Nor is its target made."""
    target = tmp_path / "target"
    if kept:
        target.write_bytes(kept)
    (tmp_path / "file.part").symlink_to(target)
    with pytest.raises(DataError, match=r"file\.part: expected a file of an earlier try or none, got a symbolic link"):
        download(server.address, tmp_path / "file")
    assert target.exists() == bool(kept) and (not kept or target.read_bytes() == kept) and server.asked == []


def test_a_part_linked_in_the_meantime_is_not_written_through(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link_first(*arguments: object) -> object:
        (tmp_path / "file.part").symlink_to(tmp_path / "target")
        return extent(*arguments)

    extent = module._extent
    monkeypatch.setattr(module, "_extent", link_first)
    with pytest.raises(DataError, match=r"file\.part: cannot be written: .*symbolic link"):
        download(server.address, tmp_path / "file")
    assert not (tmp_path / "target").exists()


def test_a_part_that_is_a_pipe_is_refused(server: Server, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file.part")
    with pytest.raises(DataError, match=r"file\.part: cannot be written: "):
        download(server.address, tmp_path / "file")


def zipped(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as target:
        for name, data in entries.items():
            target.writestr(name, data)
    return buffer.getvalue()


def visible(folder: Path) -> list[str]:
    """Names of all that lies in the folder and below; the lock of a fetch stays."""
    return sorted(path.name for path in folder.rglob("*") if path.suffix != ".lock")


@pytest.fixture
def official(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The datasets at the address of the test's own server, which has all their files."""
    emnist = {f"gzip/{name}.gz": name.encode() for name in DATASETS["emnist"].files}
    server.data = zipped({**emnist, "ConfLongDemo_JSI.txt": b"rows", "gzip/emnist-letters.gz": b"unwanted"})
    for name in ("emnist", "person_activity"):
        changed = replace(DATASETS[name], address=server.address, archive_md5="")
        monkeypatch.setitem(DATASETS, name, changed)
    return server


def test_the_wanted_files_end_up_in_the_datasets_folder(official: Server, tmp_path: Path) -> None:
    fetch("emnist", tmp_path)
    names = {f"{name}.gz" for name in DATASETS["emnist"].files}
    assert set(visible(tmp_path / "emnist")) == names
    assert fetch("person_activity", tmp_path) == [tmp_path / "person_activity/ConfLongDemo_JSI.txt"]


def test_what_is_there_is_not_fetched_again(official: Server, tmp_path: Path) -> None:
    (file,) = fetch("person_activity", tmp_path)
    file.write_bytes(b"mine")
    assert fetch("person_activity", tmp_path) == [file] and file.read_bytes() == b"mine"
    assert len(official.asked) == 1


def test_of_several_at_once_one_fetches(official: Server, tmp_path: Path) -> None:
    official.delay = 0.2
    with ThreadPoolExecutor(4) as pool:
        found = [task.result() for task in [pool.submit(fetch, "person_activity", tmp_path) for _ in range(4)]]
    assert found == [[tmp_path / "person_activity/ConfLongDemo_JSI.txt"]] * 4
    assert found[0][0].read_bytes() == b"rows" and len(official.asked) == 1


def test_a_damaged_or_harmful_archive_leaves_nothing(official: Server, tmp_path: Path) -> None:
    for data in (DATA, zipped({"ConfLongDemo_JSI.txt": b"rows", "../x": b""}), zipped({"x": b""})):
        official.data = data
        with pytest.raises(DataError):
            fetch("person_activity", tmp_path)
        assert visible(tmp_path) == ["person_activity"]


def test_what_no_program_may_fetch_says_where_to_get_it_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"img_align_celeba.zip .* from .*CelebA.html and put them into {tmp_path}/celeba"
    ):
        fetch("celeba", tmp_path)
    assert list(tmp_path.iterdir()) == []
