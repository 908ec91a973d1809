"""A headless browser, where there is one: Chromium, by the names that distributions give it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
_ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")
_TIMEOUT_S = 120


def find_browser() -> str | None:
    """Path of the browser; None where there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def browse(page: Path, *arguments: str, width: int = 1200, height: int = 900) -> subprocess.CompletedProcess[str]:
    """Open `page` in a browser of its own and let `arguments` say what to do with it; windows are 500 wide at least.

    Raises FileNotFoundError where there is no browser.
    """
    browser = find_browser()
    if browser is None:
        raise FileNotFoundError("no browser here: install Debian's chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *_ARGUMENTS, f"--user-data-dir={profile}", f"--window-size={width},{height}", *arguments]
        return subprocess.run(
            [*command, page.as_uri()], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
