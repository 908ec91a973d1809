"""An HTML page, read as a browser would: its text, its data, what it refers to."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_VOID = {"meta", "link", "img", "br", "input"}


class Page(HTMLParser):
    """`text`: what is shown. `data`: the numbers that the script shows. `references`: values of href and src."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.text, self.references, self.tags = "", [], []
        self._open: list[str] = []
        self._data = ""
        self._is_data = False
        self.feed(self.source)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self._data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("href", "src", "srcset", "action")]
        self._is_data = tag == "script" and given.get("type") == "application/json"
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._is_data and self._open[-1] == "script":
            self._data += data
        elif self._open and self._open[-1] not in ("script", "style"):
            self.text += data + " "
