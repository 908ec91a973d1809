"""Measurements that outlive the process: JSON files in a per-user directory, never trusted to be intact."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """$FXMEM_CACHE, else fxmem/ in the user's cache directory."""
    if named := os.environ.get("FXMEM_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fxmem"


def cache_file(*parts: object) -> Path:
    """The file for measurements that hold only together with `parts` (versions, device names, counts)."""
    return cache_dir() / (re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(map(str, parts))) + ".json")


def load(path: Path) -> dict[str, Any]:
    """What the file holds; empty when it is missing, unreadable or not a JSON object."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def update(path: Path, entries: Mapping[str, Any]) -> None:
    """Add `entries` by an atomic replace. A cache that can't be written is no error: it will be measured again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
            json.dump({**load(path), **entries}, file)
        os.replace(file.name, path)
    except OSError:
        return
