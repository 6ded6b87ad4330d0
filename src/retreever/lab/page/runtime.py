"""The files of onnxruntime-web that the page loads, taken from its npm package when the page is made."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from retreever.arguments import reject
from retreever.errors import BackendError, DataError
from retreever.files import read_bytes, write_bytes

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
FILES = {  # sha256 of every file, from dist/ of the package
    "ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
LARGEST = 40_000_000  # bytes of a file
SECONDS = 600  # that npm may take


def vendor(out: Path, source: Path | None) -> None:
    """Copy the files into `out`; `source` is a copy of the package, a folder or a .tgz, or None to ask npm for it."""
    with TemporaryDirectory() as draft:
        if source is None:
            source = _pack(Path(draft))
        contents = _from_folder(source) if source.is_dir() else _from_archive(source)
    for name, data in contents.items():
        found = sha256(data).hexdigest()
        if found != FILES[name]:
            raise DataError(f"{source}: {name}: expected sha256 {FILES[name]} ({PACKAGE} {VERSION}), got {found}")
        write_bytes(out / name, data)


def _pack(folder: Path) -> Path:
    """Fetch the package with npm, from the registry it is set up for."""
    npm = shutil.which("npm")
    if npm is None:
        raise BackendError(f"page: needs npm to fetch {PACKAGE} {VERSION}, or a copy of it (--runtime FOLDER)")
    command = [npm, "pack", "--silent", f"{PACKAGE}@{VERSION}", "--pack-destination", str(folder)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"page: npm pack {PACKAGE}@{VERSION} failed: {error}") from None
    archives = sorted(folder.glob("*.tgz"))
    if done.returncode or not archives:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise BackendError(f"page: npm pack {PACKAGE}@{VERSION} failed: {reason[-1] if reason else done.returncode}")
    return archives[0]


def _from_folder(folder: Path) -> dict[str, bytes]:
    place = folder / "dist" if (folder / "dist").is_dir() else folder
    for name in FILES:
        if not (place / name).exists():
            reject("runtime", f"a folder with {name}", folder)
    return {name: read_bytes(place / name, LARGEST, DataError) for name in FILES}


def _from_archive(file: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(file) as archive:
            for name in FILES:
                stream = archive.extractfile(f"package/dist/{name}")
                found[name] = b"" if stream is None else stream.read(LARGEST)
    except (OSError, tarfile.TarError, KeyError) as error:
        raise DataError(f"{file}: expected {PACKAGE} {VERSION} as npm packs it, got {error}") from None
    return found
