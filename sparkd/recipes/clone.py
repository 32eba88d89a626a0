"""Fetches the recipes of a git repository at its newest commit, bounded in memory, bytes and seconds. Never checks a file out."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sparkd.config import yaml_file
from sparkd.errors import ConfigError, SparkdError
from workers.host.interpreter import program_environment

CLONE_S = 120.0
MAX_BYTES = 256 << 20
MAX_MEMORY_BYTES = 4 << 30
# All names of files. A tree of a few bytes can list more files than a disk holds.
MAX_LISTING_BYTES = 8 << 20
MAX_RECIPES, MAX_TEXT_BYTES = 2000, 4 << 20
_MOST_FOLDERS = 64
_SHORT_BYTES = 1 << 20
# Hostile side: the repository. A letter or digit begins each part of a name, so that none is hidden and none leads upwards.
_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(?:/[A-Za-z0-9][A-Za-z0-9._+-]*)*", re.ASCII)
# Other YAML files (benchmarks, containers) have neither key.
_RECIPE = re.compile(r"^[\"']?(?:recipe_version|model)[\"']?[ \t]*:", re.MULTILINE)
_MANIFEST = ".sparkrun/registry.yaml"
_SUFFIX = ".yaml"


class _Blob(NamedTuple):
    object_id: str
    size: int


def cloned(url: str, folder: Path) -> tuple[str, str, dict[str, str]]:
    """(commit, its date, name -> text of each recipe) of the default branch. folder: an empty one, for the clone.

    Raises SparkdError if git fails or the repository is too large, ConfigError if it has no recipe.
    """
    clone = _Clone(url, folder)
    # --no-local: one file for all objects, also from a folder.
    clone.git(
        "clone", "--quiet", "--no-checkout", "--no-local", "--depth=1", "--single-branch", "--no-tags", "--", url, ".", most=MAX_BYTES
    )
    commit, _, committed = clone.git("log", "-1", "--format=%H %cI").decode().strip().partition(" ")
    files = clone.files()
    chosen, text_bytes = dict[str, _Blob](), 0
    for below in clone.folders(files):
        for path in [path for path in files if path.startswith(below)]:
            name = path.removeprefix(below).removesuffix(_SUFFIX)
            if _PATH.fullmatch(name) and len(chosen) < MAX_RECIPES and text_bytes + files[path].size <= MAX_TEXT_BYTES:
                text_bytes += files[path].size
                # A second folder of the manifest may have the same name.
                chosen[name if name not in chosen else path.removesuffix(_SUFFIX)] = files[path]
    texts = [raw.decode("utf-8", errors="replace") for raw in clone.contents(list(chosen.values()))]
    recipes = {name: text for name, text in zip(chosen, texts, strict=True) if _RECIPE.search(text)}
    if not recipes:
        raise ConfigError(f"{url} has no recipe at {commit[:12]}: no YAML file of it has a 'model:'. Give another repository.")
    return commit, committed, recipes


class _Clone:
    """A clone without a checkout in `folder`, made and read within CLONE_S."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._deadline = time.monotonic() + CLONE_S

    def files(self) -> dict[str, _Blob]:
        """The YAML files of the commit by their paths, without links and those that are too large."""
        files = dict[str, _Blob]()
        listing = self.git("ls-tree", "-r", "-l", "-z", "HEAD", most=MAX_LISTING_BYTES).decode("utf-8", errors="replace")
        for line in listing.split("\0")[:-1]:
            facts, _, path = line.partition("\t")
            mode, _, object_id, size = facts.split()
            if mode.startswith("100") and path.endswith(_SUFFIX) and int(size) <= yaml_file.MAX_BYTES:
                files[path] = _Blob(object_id, int(size))
        return files

    def folders(self, files: Mapping[str, _Blob]) -> list[str]:
        """The folders of sparkrun's manifest, else `recipes` as in eugr's repository, else the whole repository; each with its '/'."""
        for raw in self.contents([files[_MANIFEST]] if _MANIFEST in files else []):
            rows: Any = yaml_file.parse(raw, _MANIFEST, {}, last_counts=True).values.get("registries")
            tables = [row for row in rows if isinstance(row, Mapping) and "recipes" in row] if isinstance(rows, list) else []
            named = [str(row["recipes"]).strip("/") for row in tables]
            if folders := list(dict.fromkeys(f"{folder}/" for folder in named if _PATH.fullmatch(folder))):
                return folders[:_MOST_FOLDERS]
        return ["recipes/"] if any(path.startswith("recipes/") for path in files) else [""]

    def contents(self, blobs: list[_Blob]) -> list[bytes]:
        """The content of each file, in the same order."""
        wanted = "".join(f"{blob.object_id}\n" for blob in blobs).encode()
        packed = self.git("cat-file", "--batch", stdin=wanted, most=2 * MAX_TEXT_BYTES)
        contents, start = list[bytes](), 0
        for blob in blobs:
            start = packed.index(b"\n", start) + 1
            contents.append(packed[start : start + blob.size])
            start += blob.size + 1
        return contents

    def git(self, *arguments: str, stdin: bytes = b"", most: int = _SHORT_BYTES) -> bytes:
        """The output of git. Raises SparkdError if git fails, takes too long or writes a file or an output of more than `most` bytes."""
        own = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "SSH_AUTH_SOCK": os.environ.get("SSH_AUTH_SOCK", "")}
        with tempfile.TemporaryFile() as wanted, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaint:
            wanted.write(stdin)
            wanted.seek(0)
            try:
                child = subprocess.Popen(
                    ["git", "-P", *arguments], cwd=self._folder, env=program_environment(os.environ) | own,
                    stdin=wanted, stdout=output, stderr=complaint, start_new_session=True,
                )  # fmt: skip
            except FileNotFoundError:
                raise SparkdError("git is not on this machine, and it fetches registries: install it (`apt install git`).") from None
            limits = {resource.RLIMIT_FSIZE: most, resource.RLIMIT_AS: MAX_MEMORY_BYTES, resource.RLIMIT_CORE: 0}
            reason = ""
            try:
                with suppress(ProcessLookupError):
                    for limit, value in limits.items():
                        hard = resource.getrlimit(limit)[1]
                        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                        resource.prlimit(child.pid, limit, (value, value))
                child.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                reason = f"git took longer than {CLONE_S:g} s"
            finally:
                if child.returncode is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            if child.returncode and not reason:
                complaint.seek(0)
                text = complaint.read(_SHORT_BYTES).decode(errors="replace")
                # At that limit index-pack ends without a word.
                large = child.returncode == -signal.SIGXFSZ or ("invalid index-pack output" in text and text.count("fatal: ") == 1)
                reason = f"`git {arguments[0]}` gives more than {most >> 20} MiB" if large else _last_line(text)
            if reason:
                raise SparkdError(f"{self._url} cannot be fetched: {reason}. Check the address with `git ls-remote`.")
            output.seek(0)
            return output.read(most)


def _last_line(complaint: str) -> str:
    lines = [line for line in complaint.splitlines() if line.strip() and not line.startswith(("warning:", "hint:"))]
    return lines[-1].removeprefix("fatal: ").rstrip(".")[:300] if lines else "git gave no reason"
