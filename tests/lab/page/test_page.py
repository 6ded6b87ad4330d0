"""The live page: what it is made of, and its own code beside that of the package."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import threading
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from retreever import ReTreever, explain
from retreever.cli import main
from retreever.deploy.parts import Encode, Query
from retreever.errors import DataError, RetreeverError
from retreever.files import write_bytes
from retreever.lab.page import build
from retreever.lab.page.runtime import FILES, vendor
from retreever.lab.page.serve import page_server
from retreever.tree.build import plan_for

SITE = Path(str(files("retreever").joinpath("lab", "page", "site")))
NODE = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's modules")


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for file in SITE.iterdir():
        links = set(re.findall(r"\w+://[\w.]+", file.read_text(encoding="utf-8")))
        assert links <= {"http://www.w3.org"}, file.name  # the name space of SVG, which nothing is loaded from


def test_its_files_are_small() -> None:
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 250 for file in SITE.iterdir())


def run_module(name: str, code: str, folder: Path) -> Any:
    """What `code` prints as JSON; it may use a module of the page, `page`."""
    shutil.copy(SITE / name, folder / "page.mjs")
    code = f"import * as page from {json.dumps((folder / 'page.mjs').as_uri())};\n{code}"
    done = subprocess.run(["node", "--input-type=module", "-e", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def oklab(colour: str) -> torch.Tensor:
    """Coordinates whose distances are about those that eyes see."""
    screen = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    light = torch.where(screen <= 0.04045, screen / 12.92, ((screen + 0.055) / 1.055) ** 2.4)
    cones = torch.tensor([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    axes = torch.tensor([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return axes @ (cones @ light) ** (1 / 3)


@NODE
def test_every_node_read_has_its_own_colour_and_keeps_it(tmp_path: Path) -> None:
    code = """
const reads = (...nodes) => nodes.map((node) => ({ node }));
const most = Array.from({ length: page.COLOURS.length }, (_, i) => i);
const steps = [reads(5, 9, 2), reads(5, 7, 2, 11), reads(...most), reads(2, 60)];
let before;
for (const step of steps) before = page.paint(step, before);
console.log(JSON.stringify({ colours: page.COLOURS, steps, ink: page.COLOURS.map(page.inkOn) }));
"""
    found = run_module("colours.js", code, tmp_path)
    steps = [{read["node"]: read["colour"] for read in step} for step in found["steps"]]
    assert list(steps[0].values()) == found["colours"][:3]
    assert all(len(set(step.values())) == len(step) for step in steps)
    for before, after in pairwise(steps):
        assert all(before[node] == after[node] for node in before.keys() & after.keys())
    assert steps[1].keys() - steps[0].keys() == {7, 11} and steps[1][7] == steps[0][9]  # it was free
    assert len(found["colours"]) >= max(budget for _, budget in build.MODELS.values())
    places = torch.stack([oklab(colour) for colour in found["colours"]])
    apart = torch.cdist(places, places).fill_diagonal_(1)
    assert apart[:12, :12].min() > 0.12 and apart.min() > 0.07  # 0.02 is just noticeable side by side
    for colour, ink in zip(found["colours"], found["ink"], strict=True):
        assert abs(oklab(colour)[0] - (1.0 if ink == "#fff" else 0.25)) > 0.3


@NODE
@pytest.mark.parametrize(("n", "budget"), [(1, 1), (3, 1), (12, 1), (12, 7), (9, 16)])
def test_steps_and_nodes_are_those_of_explain(n: int, budget: int, tmp_path: Path) -> None:
    """The page's explanation of a search is that of the package, less steps where there is nothing to decide."""
    torch.manual_seed(n)
    model, most = ReTreever(dim=16, heads=2, layers=0, hidden=16).eval(), 16
    plan = plan_for(most, 2, ragged=True)
    x, mask, xt = torch.rand(1, most, 1), torch.arange(most)[None] < n, torch.rand(1, 1, 1)
    with torch.no_grad():
        tree = Encode(model)(x, x, mask)
        nodes = (tree["keys"], tree["values"], tree["node_mask"])
        found = Query(model, plan, most, explain=True)(*nodes, xt, torch.tensor([budget]))
        search = explain(model.search(model.encode(x, x, mask), xt, budget=budget), row=0, query=0)
    given = {
        "plan": {key: getattr(plan, key) for key in ("branch", "block", "depth", "offsets", "leaf_offset", "leaves")},
        "tree": {"real": tree["node_mask"][0].int().tolist(), "order": tree["order"][0, :n].tolist()},
        "found": {key: found[key][0, 0].tolist() for key in ("selected", "weights", "policy")},
    }
    code = f"""
const given = {json.dumps(given)};
console.log(JSON.stringify(page.explain(given.plan, given.tree, given.found)));
"""
    ours = run_module("search.js", code, tmp_path)
    theirs = [step for step in search.steps if len(step.children) > 1 or not step.taken]
    assert [(s["node"], s["children"], s["taken"]) for s in ours["steps"]] == [
        (s.node, list(s.children), list(s.taken)) for s in theirs
    ]
    assert {read["node"]: sorted(read["points"]) for read in ours["reads"]} == {
        read.node: sorted(read.numbers) for read in search.selected
    }


def test_the_server_gives_scripts_and_wasm_their_types(tmp_path: Path) -> None:
    for name in ("index.html", "a.mjs", "b.js", "c.wasm"):
        (tmp_path / name).write_text("x")
    with page_server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        types = {}
        for name in ("index.html", "a.mjs", "b.js", "c.wasm"):
            with urlopen(f"http://127.0.0.1:{port}/{name}", timeout=10) as answer:
                types[name] = answer.headers["Content-Type"]
        with pytest.raises(RetreeverError, match=r"^port: expected a free port"):
            page_server(tmp_path, port)
        server.shutdown()
    script = "text/javascript"
    assert types == {"index.html": "text/html", "a.mjs": script, "b.js": script, "c.wasm": "application/wasm"}


def test_a_runtime_that_is_not_the_one_known_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "package" / "dist"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text("something else")
    with tarfile.open(tmp_path / "runtime.tgz", "w:gz") as archive:
        archive.add(tmp_path / "package", "package")
    for source in (folder, tmp_path / "package", tmp_path / "runtime.tgz"):
        with pytest.raises(DataError, match="expected sha256"):
            vendor(tmp_path / "out", source)
    (folder / next(iter(FILES))).unlink()
    with pytest.raises(RetreeverError, match=r"^runtime: expected a folder with"):
        vendor(tmp_path / "out", folder)
    with pytest.raises(DataError, match="as npm packs it"):
        vendor(tmp_path / "out", tmp_path / "none.tgz")
    assert not (tmp_path / "out").exists()


def test_files_of_others_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "style.css").write_text("mine")
    assert main(["page", "--out", str(tmp_path)]) == 2
    assert "out: expected a folder without other files" in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("style.css", "mine")]
    assert main(["page", "--out", str(tmp_path / "new"), "--serve", "--port", "99999"]) == 2
    assert "port: expected a port from 0 to 65535" in capsys.readouterr().err


def test_a_page_that_was_stopped_is_finished_and_models_of_others_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "vendor", lambda out, _: [write_bytes(out / name, b"") for name in FILES])
    monkeypatch.setattr(build, "MODELS", {"copy-256": (2, 2)})
    export = build.export

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "export", stop)
    with pytest.raises(KeyboardInterrupt):
        build.build_page(tmp_path / "page")
    assert not build.is_page(tmp_path / "page") and not (tmp_path / "page" / "index.html").exists()
    monkeypatch.setattr(build, "export", partial(export, format="pt2"))
    build.build_page(tmp_path / "page")
    assert build.is_page(tmp_path / "page")
    mine = write_bytes(tmp_path / "other" / "models" / "copy-256" / "export.json", b"mine")
    with pytest.raises(RetreeverError, match=r"^out: expected no earlier export"):
        build.build_page(tmp_path / "other")
    assert mine.read_bytes() == b"mine"


def test_without_npm_the_command_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["page", "--out", str(tmp_path / "page")]) == 2
    assert "page: needs npm to fetch onnxruntime-web" in capsys.readouterr().err
