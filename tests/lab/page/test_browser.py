"""The live page in a real browser: `make test-slow`. RETREEVER_PAGE names a page made before, and saves minutes."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from retreever import load_pretrained
from retreever.lab.page.build import build_page
from retreever.lab.page.serve import page_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HOW = "make test-slow; Debian: apt-get install chromium npm"
SHOTS = Path(os.environ.get("RETREEVER_SHOTS", "runs/page-shots"))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = Path(os.environ.get("RETREEVER_PAGE", "") or tmp_path_factory.mktemp("page"))
    if not (folder / "index.html").exists():
        if shutil.which("npm") is None:
            pytest.skip(f"needs npm: {HOW}")
        size = build_page(folder)
        assert size < 25e6
    with page_server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason=f"needs playwright: {HOW}")
    own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"needs a browser: {HOW} ({str(error).splitlines()[0]})")
        yield found
        found.close()


class Watched:
    """A page of the browser, and everything it complained of or asked of other hosts."""

    def __init__(self, browser: Any, address: str, **settings: Any) -> None:
        self.page = browser.new_page(**settings)
        self.bad: list[str] = []
        self.page.on("console", lambda message: self.bad.append(message.text))
        self.page.on("pageerror", lambda error: self.bad.append(str(error)))
        self.page.on("request", lambda r: r.url.startswith((address, "data:", "blob:")) or self.bad.append(r.url))
        self.page.goto(address)
        self.wait()

    def wait(self) -> None:
        """Until the model has answered everything asked."""
        self.page.wait_for_function("document.documentElement.dataset.busy === 'no'", timeout=120_000)

    def choose(self, group: str, value: str) -> None:
        self.page.check(f"[name={group}][value={value}]")

    def click(self, x: float, y: float) -> None:
        """Click the plot at a fraction of its width and height."""
        box = self.page.locator("#plot").bounding_box()
        self.page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
        self.wait()

    def shown(self) -> dict[str, Any]:
        """What the page shows: points, query, budget, mean, std and nodes read."""
        data = self.page.locator("#prediction").evaluate("element => ({...element.dataset})")
        return {name: json.loads(value) for name, value in data.items()}

    def steps(self) -> str:
        return self.page.inner_text("#step")


def agrees(name: str, shown: dict[str, Any]) -> None:
    """What the page shows is what Python predicts and reads."""
    model = load_pretrained(name)
    xc = torch.tensor([[point["x"] for point in shown["points"]]])
    yc = torch.tensor([[[point["y"]] for point in shown["points"]]])
    xt = torch.tensor([[shown["query"]]])
    with torch.no_grad():
        dist = model.predict(xc, yc, xt, budget=shown["budget"])
        search = model.search(model.encode(xc, yc), xt, budget=shown["budget"])
    assert abs(dist.mean.item() - shown["mean"]) < 1e-3
    assert abs(dist.stddev.item() - shown["std"]) < 1e-3
    assert len(shown["read"]) == int(search.tokens_read)
    assert sorted(p for read in shown["read"] for p in read["points"]) == list(range(len(shown["points"])))
    assert abs(sum(read["weight"] for read in shown["read"]) - 1) < 1e-3


def test_the_curve(browser: Any, address: str) -> None:
    watched = Watched(browser, address, viewport={"width": 1200, "height": 860})
    first = float(watched.page.evaluate("document.documentElement.dataset.first"))
    print(f"first prediction after {first:.0f} ms")
    assert first < (2_000 if os.getloadavg()[0] < 1.5 else 20_000)
    before = watched.shown()
    agrees("gp", before)
    watched.click(0.3, 0.2)
    watched.click(0.6, 0.8)
    after = watched.shown()
    assert len(after["points"]) == len(before["points"]) + 2 and after["mean"] != before["mean"]
    agrees("gp", after)
    watched.choose("tool", "query")
    watched.click(0.8, 0.5)
    assert watched.shown()["query"] != after["query"]
    agrees("gp", watched.shown())
    watched.page.fill("#budget", "12")
    watched.wait()
    assert len(watched.shown()["read"]) > len(after["read"])
    agrees("gp", watched.shown())
    point_at_a_point(watched)
    watched.page.click("#first")
    assert watched.steps().startswith("step 0 of") and "explored" in watched.page.inner_text("#story")
    watched.page.click("#last")
    shoot(watched, "curve")
    watched.choose("tool", "remove")
    box = after["points"][-1]
    watched.click(0.6, 0.8)
    assert box not in watched.shown()["points"]
    watched.page.click("#clear")
    watched.wait()
    assert "Add a point" in watched.page.inner_text("#prediction")
    watched.page.click("#undo")
    watched.wait()
    agrees("gp", watched.shown())
    assert watched.bad == []


def colours(watched: Watched) -> dict[int, str]:
    return {read["node"]: read["colour"] for read in watched.shown()["read"]}


def point_at_a_point(watched: Watched) -> None:
    """A point, its place in the tree and its row have one colour, and stand out together."""
    circle = watched.page.locator("#plot circle[data-node]").first
    node, colour = int(circle.get_attribute("data-node")), circle.get_attribute("fill")
    assert colours(watched)[node] == colour
    assert watched.page.locator(f"#tree [data-node='{node}'] [fill='{colour}']").count() == 1
    circle.hover()
    assert watched.page.locator("tr.lit td").first.inner_text() == str(node)
    assert watched.page.locator("#plot circle[r='9']").count() == sum(
        len(read["points"]) for read in watched.shown()["read"] if read["node"] == node
    )


def test_the_digit(browser: Any, address: str) -> None:
    watched = Watched(browser, address, viewport={"width": 1200, "height": 860})
    watched.choose("view", "emnist")
    watched.page.wait_for_selector("#spread")
    watched.wait()
    agrees("emnist", watched.shown())
    shoot(watched, "digit")
    before = len(watched.shown()["points"])
    for place in ((0.51, 0.52), (0.55, 0.52), (0.05, 0.9)):
        watched.click(*place)
    assert before < len(watched.shown()["points"]) <= before + 3
    agrees("emnist", watched.shown())
    few = colours(watched)
    watched.page.fill("#budget", "64")
    watched.wait()
    agrees("emnist", watched.shown())
    many = colours(watched)
    assert len(many) > 40 and len(set(many.values())) == len(many)
    assert few.keys() & many.keys() and all(many[node] == few[node] for node in few.keys() & many.keys())
    watched.page.click("#clear")
    watched.wait()
    watched.click(0.5, 0.5)  # a single pixel
    assert len(watched.shown()["points"]) == 1
    agrees("emnist", watched.shown())
    assert watched.bad == []


def test_keyboard_alone_is_enough(browser: Any, address: str) -> None:
    watched = Watched(browser, address)
    keyboard, page = watched.page.keyboard, watched.page
    page.focus("#plot")
    before = watched.shown()
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "Enter"):
        keyboard.press(key)
    watched.wait()
    points = watched.shown()["points"]
    assert len(points) == len(before["points"]) + 1
    keyboard.press("q")
    watched.wait()
    assert watched.shown()["query"] == points[-1]["x"]
    page.focus("#budget")
    keyboard.press("ArrowRight")
    watched.wait()
    assert watched.shown()["budget"] == 2
    page.focus("#back")
    done = watched.steps()
    keyboard.press("Enter")
    assert watched.steps() != done
    agrees("gp", watched.shown())
    assert watched.bad == []


def test_a_phone(browser: Any, address: str) -> None:
    """Touch adds points, and nothing is wider than the screen."""
    watched = Watched(browser, address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    before = len(watched.shown()["points"])
    box = watched.page.locator("#plot").bounding_box()
    watched.page.touchscreen.tap(box["x"] + 0.4 * box["width"], box["y"] + 0.3 * box["height"])
    watched.wait()
    assert len(watched.shown()["points"]) == before + 1
    agrees("gp", watched.shown())
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    shoot(watched, "phone")
    assert watched.bad == []


def shoot(watched: Watched, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    watched.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)
