"""Fetches the recipes of a git repository at its newest commit, bounded in bytes and seconds."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkd.config import yaml_file
from sparkd.errors import ConfigError, SparkdError
from workers.host.interpreter import program_environment

CLONE_S = 120.0
LOOK_S = 0.2
MAX_BYTES = 256 << 20
MAX_RECIPES = 2000
# Hostile side: the repository. A letter or digit begins each part of a name, so that none is hidden and none leads upwards.
_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(?:/[A-Za-z0-9][A-Za-z0-9._+-]*)*", re.ASCII)
# Other YAML files (benchmarks, containers) have neither key.
_RECIPE = re.compile(r"^[\"']?(?:recipe_version|model)[\"']?[ \t]*:", re.MULTILINE)
_MANIFEST = Path(".sparkrun", "registry.yaml")


def cloned(url: str, folder: Path) -> tuple[str, str, dict[str, str]]:
    """(commit, its date, name -> text of each recipe) of the default branch. folder: an empty one, for the clone.

    Raises SparkdError if git fails or the repository is too large, ConfigError if it has no recipe.
    """
    # Without symbolic links, which become files with the link's target as their text, no name leads out of the folder.
    _git(url, folder, "clone", "--quiet", "--depth=1", "--single-branch", "--no-tags", "--config=core.symlinks=false", "--", url, ".")
    commit, committed = _git(url, folder, "log", "-1", "--format=%H %cI").split()
    recipes = dict[str, str]()
    for below in _folders(folder):
        for path in sorted((folder / below).rglob("*.yaml")):
            name = path.relative_to(folder / below).as_posix().removesuffix(".yaml")
            if _PATH.fullmatch(name) and path.is_file() and path.stat().st_size <= yaml_file.MAX_BYTES and len(recipes) < MAX_RECIPES:
                text = path.read_text("utf-8", errors="replace")
                if _RECIPE.search(text):
                    # A second folder of the manifest may have the same name.
                    recipes[name if name not in recipes else path.relative_to(folder).as_posix().removesuffix(".yaml")] = text
    if not recipes:
        raise ConfigError(f"{url} has no recipe at {commit[:12]}: no YAML file of it has a 'model:'. Give another repository.")
    return commit, committed, recipes


def _folders(root: Path) -> list[str]:
    """The folders of sparkrun's manifest, else `recipes` as in eugr's repository, else the whole repository."""
    manifest = root / _MANIFEST
    if manifest.is_file() and manifest.stat().st_size <= yaml_file.MAX_BYTES:
        rows: Any = yaml_file.parse(manifest.read_bytes(), str(_MANIFEST), {}, last_counts=True).values.get("registries")
        tables = [row for row in rows if isinstance(row, Mapping) and row.get("enabled") is not False] if isinstance(rows, list) else []
        named = [str(row.get("subpath") or row.get("recipes") or "recipes").strip("/") for row in tables]
        if folders := list(dict.fromkeys(folder for folder in named if _PATH.fullmatch(folder))):
            return folders
    return ["recipes"] if (root / "recipes").is_dir() else ["."]


def _git(url: str, folder: Path, *arguments: str) -> str:
    """The output of git in `folder`. Raises SparkdError if git fails, takes longer than CLONE_S or writes more than MAX_BYTES."""
    own = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "SSH_AUTH_SOCK": os.environ.get("SSH_AUTH_SOCK", "")}
    try:
        child = subprocess.Popen(
            ["git", "-P", *arguments],
            cwd=folder,
            env=program_environment(os.environ) | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise SparkdError("git is not on this machine, and it fetches registries: install it (`apt install git`).") from None
    output, reason = "", ""
    deadline = time.monotonic() + CLONE_S
    with child:
        while not reason:
            try:
                output, complaint = child.communicate(timeout=LOOK_S)
                reason = _too_large(folder) or (_last_line(complaint) if child.returncode else "")
                break
            except subprocess.TimeoutExpired:
                reason = f"git took longer than {CLONE_S:g} s" if time.monotonic() > deadline else _too_large(folder)
        child.kill()
    if reason:
        raise SparkdError(f"{url} cannot be fetched: {reason}. Check the address with `git ls-remote`.")
    return output


def _last_line(complaint: str) -> str:
    lines = [line for line in complaint.splitlines() if line.strip() and not line.startswith(("warning:", "hint:"))]
    return lines[-1].removeprefix("fatal: ").rstrip(".")[:300] if lines else "git gave no reason"


def _too_large(folder: Path) -> str:
    """The reason if the folder holds more than MAX_BYTES on disk, else an empty text."""
    used_bytes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                used_bytes += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # git renames its temporary files
        if used_bytes > MAX_BYTES:
            return f"it has more than {MAX_BYTES >> 20} MiB"
    return ""
