"""Opens pages in a real browser, offline. A console message, an error or a request fails the test."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@contextmanager
def browser() -> Iterator[Any]:
    """Yields a page of headless Chromium; skips the test if it is not installed.

    All files open in this page: one of its own for each would start a process and compile the libraries again, which
    is most of the work.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install -e '.[test]'")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as library:
        running = library.chromium.launch(
            executable_path=found, args=["--no-sandbox"] if os.geteuid() == 0 else [], timeout=120_000
        )
        page = running.new_context(offline=True).new_page()
        page.set_default_timeout(120_000)
        yield page
        running.close()


@contextmanager
def opened(page: Any, file: Path, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """Opens a file. Fails the test on a console message, an error, or a request for anything else.

    Args:
        page: of `browser`.
        width: of the window, pixels.
        scheme: `light` or `dark`.
    """
    said: list[str] = []
    listeners = {
        "console": lambda message: said.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: said.append(f"error: {error}"),
        "request": lambda request: said.append(f"request: {request.url}"),
    }
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.mouse.move(0, 0)
    for event, listener in listeners.items():
        page.on(event, listener)
    try:
        page.goto(file.absolute().as_uri())
        until(page, "document.querySelectorAll('.plot canvas').length > 0 || !document.querySelector('#pictures')")
        page.wait_for_timeout(100)
        yield page
        assert said == [f"request: {file.absolute().as_uri()}"]
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)


def until(page: Any, expression: str, seconds: float = 120.0) -> None:
    """Waits until an expression is true on the page; Playwright's own way needs `eval`, which the page forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not true within {seconds} s: {expression}"
        page.wait_for_timeout(30)


def contrast(page: Any, selector: str) -> float:
    """The WCAG contrast of an element's text to what is behind it."""
    return page.evaluate(
        """(selector) => {
          const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
          const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
          const light = (color) => {
            const [r, g, b] = numbers(color).map((v) => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const element = document.querySelector(selector);
          let behind = element;
          while (behind && (numbers(getComputedStyle(behind).backgroundColor)[3] === 0)) behind = behind.parentElement;
          const front = light(getComputedStyle(element).color);
          const back = light(getComputedStyle(behind || document.body).backgroundColor);
          return (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
        }""",
        selector,
    )


def painted(page: Any, selector: str) -> list[float]:
    """Returns the fraction of drawn pixels of each canvas below `selector`."""
    return page.evaluate(
        """(selector) => [...document.querySelectorAll(selector + ' canvas')].map((canvas) => {
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          let painted = 0;
          for (let i = 3; i < data.length; i += 4) painted += data[i] > 0;
          return painted / (data.length / 4);
        })""",
        selector,
    )
