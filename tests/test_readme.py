"""What the documents say is true: their Python runs and prints what they show, their links lead somewhere, their
commands exist."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
import tyro

from retreever.cli import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
SECONDS = 60  # of CPU time for one block; it should take one
FENCE = re.compile(r"^ *(?P<fence>```+|~~~+) *(?P<language>\w*).*\n(?P<code>(?:.*\n)*?) *(?P=fence) *$", re.M)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINKS = (
    re.compile(r"\[[^\[\]]*(?:\[[^\[\]]*\]\([^()]*\))?[^\[\]]*\]\(\s*<?([^()\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)"),
    re.compile(r"!\[[^\]]*\]\(\s*<?([^()\s>]+)"),
    re.compile(r"^ *\[[^\]]+\]:\s*<?([^\s>]+)", re.M),
    re.compile(r"\b(?:src|href)=[\"']([^\"']+)[\"']"),
)


class Block(NamedTuple):
    """A fenced block of a document, and the line it starts on."""

    path: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.path.parent.name}-{self.path.name}-{self.line}"


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = FENCE.finditer(text)
    return [Block(path, text.count("\n", 0, f.start()) + 1, f["language"], f["code"]) for f in found]


def prose_of(path: Path) -> str:
    """The document without its fenced blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def shown_output(code: str) -> list[str]:
    """The comment lines directly after each print."""
    lines, shown = code.splitlines(), []
    for node in ast.parse(code).body:
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("print("):
            for line in lines[node.end_lineno :]:
                if not line.startswith("#"):
                    break
                shown.append(line.removeprefix("#").strip())
    return shown


RUNNER = f"""
import json, os, signal, sys, traceback
import torch, retreever, retreever.ops.search.launch_numba
assert all(hasattr(retreever, name) for name in retreever.__all__)
for line in sys.stdin:
    code, folder = json.loads(line)
    if (child := os.fork()) == 0:
        signal.setitimer(signal.ITIMER_PROF, {SECONDS})
        os.chdir(folder)
        for number, name in enumerate((os.devnull, "../stdout", "../stderr")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        status = 1
        try:
            exec(code, {{"__name__": "__main__"}})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run_block() -> Iterator[Callable[[Block, Path], None]]:
    """Run a block as a user would: in a process and a folder of its own, where nothing was named or computed before.

    The processes are forked from one that has imported the library and done nothing else.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", RUNNER]
    runner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert runner.stdin is not None and runner.stdout is not None
    stdin, stdout = runner.stdin, runner.stdout

    def run(block: Block, place: Path) -> None:
        (place / "folder").mkdir()
        print(json.dumps([block.code, str(place / "folder")]), file=stdin, flush=True)
        status = int(stdout.readline())
        assert status == 0, f"{status}: {(place / 'stderr').read_text()}"
        shown = shown_output(block.code)
        assert not shown or (place / "stdout").read_text().splitlines() == shown

    with runner:
        yield run


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs_and_prints_what_is_shown(
    block: Block, tmp_path: Path, run_block: Callable[[Block, Path], None]
) -> None:
    run_block(block, tmp_path)


def anchors_of(path: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, no punctuation, hyphens for spaces, numbers for repetitions."""
    seen: Counter[str] = Counter()
    anchors = set(re.findall(r"\b(?:id|name)=[\"']([^\"']+)[\"']", prose_of(path)))
    for heading in re.findall(r"^ {0,3}#{1,6} +(.*?)[ #]*$", prose_of(path), re.M):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def links_of(path: Path) -> set[str]:
    """Targets of links and images that do not lead to another site."""
    prose = INLINE.sub("", prose_of(path))
    found = {target for pattern in LINKS for target in pattern.findall(prose)}
    return {target for target in found if not re.match(r"[a-z][a-z0-9+.-]*:|//", target)}


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in sorted(links_of(path)):
        name, _, anchor = unquote(link).partition("#")
        target = path.parent / name if name else path
        if not target.exists() or name.startswith("/") or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_images_lead_to_files_and_headings(path: Path) -> None:
    assert broken_links(path) == []


def commands_of(path: Path) -> set[str]:
    """Every `retreever ...` in blocks and inline code, without what stands before it or is joined to it."""
    texts = [line for block in blocks_of(path) if block.language != "python" for line in block.code.splitlines()]
    parts = [part for text in texts + INLINE.findall(prose_of(path)) for part in re.split(r"&&|\|\||[;|]", text)]
    start = re.compile(r"^[\s$]*(?:[A-Z_]+=\S+\s+)*(?:\S*/)?retreever(?=\s|$)(?!\s*=)")
    return {start.sub("", part).strip() for part in parts if start.match(part)}


class CommandLine:
    """The command line, which reads arguments here but runs nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        real: Callable[..., Any] = tyro.cli
        idle = SimpleNamespace(run=lambda: None)
        monkeypatch.setattr(tyro, "cli", lambda *args, **settings: real(*args, **settings) and idle)
        self.capsys = capsys

    def read(self, words: list[str]) -> tuple[object, str]:
        """Exit code and what was printed."""
        try:
            code: object = main(words)
        except SystemExit as stopped:
            code = stopped.code
        return code, " ".join(self.capsys.readouterr().out.split())

    def knows(self, command: str) -> bool:
        """Whether it can be run as it stands or, where it only names a command, has help of its own."""
        words = [word for word in shlex.split(command, comments=True) if word not in ("...", "…", "--help")]
        if self.read(words)[0] == 0:
            return True
        code, printed = self.read([*words, "--help"])
        names_only = not any(word.startswith("-") for word in words)
        return names_only and code == 0 and printed.startswith(" ".join(["usage: retreever", *words, "["]))


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.mark.parametrize("command", sorted({command for path in DOCUMENTS for command in commands_of(path)}))
def test_commands_are_ones_the_command_line_knows(command: str, command_line: CommandLine) -> None:
    assert command_line.knows(command)


# The tests above must be able to fail.


def a_document(folder: Path, text: str) -> Path:
    path = folder / "document.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_documents_have_something_to_check() -> None:
    assert len(PYTHON) >= 2 and any(shown_output(block.code) for block in PYTHON)
    assert any(links_of(path) for path in DOCUMENTS) and any(commands_of(path) for path in DOCUMENTS)


@pytest.mark.parametrize("code", ["print(1)\n# 2\n", "print(1)\n# 1\nprint(2)\n", "raise ValueError\n"])
def test_a_block_that_is_wrong_is_noticed(code: str, tmp_path: Path, run_block: Callable[[Block, Path], None]) -> None:
    (block,) = blocks_of(a_document(tmp_path, f"text\n```python\n{code}```\n"))
    assert block.line == 2
    with pytest.raises(AssertionError):
        run_block(block, tmp_path)


def test_links_are_checked_down_to_the_heading(tmp_path: Path) -> None:
    text = """# One, *two* & `three`\n## Same\n## Same\n```\n[not](a-link.md)\n# nor a heading\n```\n`[nor](this.md)`
    [a](#one-two--three) [b](document.md#same-1) [c](https://example.org/x) ![d](document.md "title")
    [e](missing.md) [f](#nor-a-heading) [g](document.md#same-2) [![h](gone.png)](document.md) <img src="lost.png">
"""
    expected = ["#nor-a-heading", "document.md#same-2", "gone.png", "lost.png", "missing.md"]
    assert broken_links(a_document(tmp_path, text)) == expected


def test_commands_are_found_and_unknown_ones_refused(tmp_path: Path, command_line: CommandLine) -> None:
    text = """`retreever demo`, `retreever bench` and `retreever`, `import retreever`, `runs/retreever.txt`
```
git clone x && cd retreever
$ A=1 .venv/bin/retreever version   # comment
make && retreever bench build --n 256
```
"""
    found = commands_of(a_document(tmp_path, text))
    assert found == {"", "demo", "bench", "version   # comment", "bench build --n 256"}
    assert [command for command in found if not command_line.knows(command)] == []
    unknown = ("nonsense", "bench nonsense", "nonsense --help", "demo --nonsense 1", "demo --n many")
    assert [command for command in unknown if command_line.knows(command)] == []
