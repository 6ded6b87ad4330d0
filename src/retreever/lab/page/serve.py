"""Serves the page on this machine alone."""

from __future__ import annotations

from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from retreever.arguments import check_int, reject

HOST = "127.0.0.1"


class Files(SimpleHTTPRequestHandler):
    """Files of a folder, of the types that browsers insist on, without a line of log for each."""

    extensions_map = {  # noqa: RUF012 - the base class has it
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".js": "text/javascript",
        ".wasm": "application/wasm",
    }

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def check_port(port: int) -> None:
    """`port` must be one that a server can listen on."""
    check_int("port", port, 0)
    if port > 65_535:
        reject("port", "a port from 0 to 65535", port)


def page_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server of the folder that listens on 127.0.0.1; port 0 takes any free one."""
    check_port(port)
    try:
        return ThreadingHTTPServer((HOST, port), partial(Files, directory=str(folder)))
    except OSError as error:
        reject("port", f"a free port (--port 0 takes any): {error.strerror or error}", port)


def serve_page(folder: Path, port: int) -> None:
    """Serve the folder until interrupted."""
    with page_server(folder, port) as server:
        print(f"serving {folder} at http://{HOST}:{server.server_address[1]} (Ctrl-C stops)", flush=True)
        server.serve_forever()
