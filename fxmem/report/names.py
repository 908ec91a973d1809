"""Modules and lines of source as a reader knows them: paths relative to the package or to the working folder."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

_INSTALLED = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")
_FILE = re.compile(r"[^\s()]*[/\\][^\s()]*?\.py(?=:\d+)")
_PLACE = re.compile(r"^(?P<file>.*?):(?P<line>\d+): ?(?P<code>.*)$", re.DOTALL)


def short_source(source: str) -> str:
    """'file:line: code' with the file relative to its package, or to the working folder."""
    place = _PLACE.match(source)
    return f"{short_path(place['file'])}:{place['line']}: {place['code']}" if place else source


def line_of(source: str) -> str:
    """'file:line' of that, without the code."""
    place = _PLACE.match(source)
    return f"{short_path(place['file'])}:{place['line']}" if place else source


def short_text(text: str) -> str:
    """`text` with the files that it names like that."""
    return _FILE.sub(lambda found: short_path(found[0]), text)


def shortened(text: str, width: int) -> str:
    """The end of `text`, `width` characters of it: of a path what says most."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def split_source(source: str) -> tuple[str, int, str]:
    """(file, line, code) as they are; ("", 0, "") of what is not known."""
    place = _PLACE.match(source)
    return (place["file"], int(place["line"]), place["code"]) if place else ("", 0, "")


@functools.lru_cache(maxsize=4096)
def short_path(file: str) -> str:
    """`file` relative to site-packages, to the working folder, or to the longest entry of `sys.path` that holds it; of
    a path of some other machine the last two parts."""
    installed = _INSTALLED.sub("", file)
    if installed != file:
        return installed
    path = Path(file)
    paths = sorted(map(Path, filter(None, sys.path)), key=lambda root: -len(root.parts))
    root = next((root for root in (Path.cwd(), *paths) if path.is_relative_to(root)), None)
    if root is not None:
        return str(path.relative_to(root))
    return str(Path(*path.parts[-2:])) if path.is_absolute() else file


def module_shown(module: str) -> str:
    """A module's path, or what stands for the model itself."""
    return module or "(the model itself)"
