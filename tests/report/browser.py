"""Pages in a real browser: in a frame as wide as a phone or a desk, with a pointer moved over every chart."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.browser import browse, find_browser

FRAME = """<body style="margin:0"><iframe style="width:{width}px;height:900px;border:0" srcdoc="{page}"></iframe>
<script>document.querySelector("iframe").addEventListener("load", (event) => {{
  const view = event.target.contentWindow, page = view.document, seen = [];
  page.querySelectorAll("[data-chart]").forEach((box) => {{
    const area = box.getBoundingClientRect();
    for (let x = 0; x < area.width; x += 1) {{
      box.dispatchEvent(new view.PointerEvent("pointermove", {{ clientX: area.left + x, clientY: area.top + 5 }}));
      seen.push(page.querySelector(".tip").textContent.replaceAll("\\n", " | "));
    }}
  }});
  page.querySelectorAll("details").forEach((d) => {{ d.open = true; }});
  const wide = page.documentElement.scrollWidth > view.innerWidth;
  const over = [...page.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > view.innerWidth);
  const background = view.getComputedStyle(page.body).backgroundColor;
  const out = document.body.appendChild(document.createElement("pre"));
  out.id = "probe";
  out.textContent = JSON.stringify({{
    seen, wide, background, width: view.innerWidth, over: over.map((e) => `${{e.tagName}} ${{e.className}}`),
  }});
}});</script>"""


def browser_or_skip() -> None:
    if find_browser() is None:
        pytest.skip("no browser here: install Debian's chromium to run this")


def probed(path: Path, width: int, scheme: int, tmp_path: Path) -> dict[str, Any]:
    """What a browser finds on the page at that width; `scheme`: 0 dark, 1 light."""
    browser_or_skip()
    outer = tmp_path / "outer.html"
    outer.write_text(FRAME.format(width=width, page=html.escape(path.read_text(encoding="utf-8"))), encoding="utf-8")
    wait, colours = "--virtual-time-budget=5000", f"--blink-settings=preferredColorScheme={scheme}"
    done = browse(outer, "--dump-dom", wait, colours, width=max(width, 500))
    assert "CONSOLE" not in done.stderr, done.stderr
    (found,) = re.findall(r'<pre id="probe">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    return json.loads(html.unescape(found))
