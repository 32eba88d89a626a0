"""Owns fetching a registry with git: the recipes of one commit, bounded in bytes and seconds. Never checks a file out, never runs one.

The repository is bare and is removed again, so that hooks, filters, submodules and links of it have nothing to act on. Blocks its thread
for up to FETCH_S: for a command line, never for the daemon.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkd.errors import ConfigError, SparkdError, StateError
from sparkd.models.source import FOLDER_SIGNS
from sparkd.recipes.library import AsWritten
from sparkd.recipes.registry import NAME, CommitSignature, Registry
from sparkd.render.page import printable
from sparkd.schema import yaml_file
from workers.host.private_files import private_folder

FETCH_S, LOOK_S = 120.0, 30.0
MAX_PACK_BYTES = 256 << 20
MAX_MEMORY_BYTES = 4 << 30
# All file names together. A tree of a few bytes can list more files than a disk holds.
MAX_LISTING_BYTES = 8 << 20
MAX_RECIPES, MAX_TEXT_BYTES = 2000, 4 << 20

MANIFEST = ".sparkrun/registry.yaml"
_RECIPES = "recipes"
_SUFFIX = ".yaml"
# A letter or digit begins each part, so that none is '..' and none is hidden.
_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*(?:/[A-Za-z0-9][A-Za-z0-9._+-]*)*", re.ASCII)
_RECIPE = re.compile(rb"^[\"']?(?:recipe_version|model)[\"']?[ \t]*:", re.MULTILINE)
_SCP = re.compile(r"(?:[A-Za-z0-9._-]+@)?[A-Za-z0-9][A-Za-z0-9.-]*:[A-Za-z0-9._~/-]+", re.ASCII)
_ODD = re.compile(r"[\x00-\x20\x7f-\x9f]")
_STATES = {"G": "good", "U": "untrusted", "X": "expired", "Y": "expired", "E": "unknown", "N": "none"}

# The variables of this process that git gets: no GIT_*, which could name hooks, configuration or other repositories.
_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "SSH_AUTH_SOCK", "GNUPGHOME", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY",
)  # fmt: skip
_ENVIRONMENT = {
    "LC_ALL": "C",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PROTOCOL_FROM_USER": "0",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    # Nothing to type in, no agent and no display for the other side.
    "GIT_SSH_COMMAND": "ssh -a -x -oBatchMode=yes",
}
_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    # A larger file is never held in memory.
    "core.bigFileThreshold": "1m",
    "credential.helper": "",
    # One file for all objects, which MAX_PACK_BYTES then bounds.
    "fetch.unpackLimit": "1",
    "fetch.recurseSubmodules": "false",
    "submodule.recurse": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "pack.threads": "1",
    "transfer.bundleURI": "false",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "30",
}


@dataclass(frozen=True, slots=True)
class RegistryAddress:
    """Where a registry comes from. protocol: the one that git may use for it: https, ssh or file."""

    url: str
    protocol: str

    @property
    def default_name(self) -> str:
        """The repository's own name, as a registry may be called; empty where nothing of it can be used."""
        last = self.url.rstrip("/").rpartition("/")[2].rpartition(":")[2].lower().removesuffix(".git")
        name = re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")[:64]
        return name if NAME.fullmatch(name) else ""


@dataclass(frozen=True, slots=True)
class _Entry:
    mode: str
    kind: str
    object_id: str
    size: int
    path: str


def source_of(text: str) -> RegistryAddress:
    """An https or ssh address, or a folder of this machine. Raises ConfigError for any other, without showing a password."""
    scheme, has_scheme, _ = text.partition("://")
    if _ODD.search(text) or not text or text.startswith("-") or "::" in text:
        raise ConfigError("A registry is https://HOST/PATH, ssh://HOST/PATH or a folder, without blanks and '::'. Give one of these.")
    folder = Path(os.path.abspath(os.path.expanduser(text)))
    if not has_scheme and (text.startswith(FOLDER_SIGNS) or text in (".", "..") or folder.is_dir()):
        if not folder.is_dir():
            raise ConfigError(f"{text}: there is no such folder. Give one with a git repository, or an https or ssh address.")
        return RegistryAddress(str(folder), "file")
    if has_scheme:
        return _addressed(text, scheme)
    if _SCP.fullmatch(text):
        return RegistryAddress(text, "ssh")
    raise ConfigError(f"{text[:100]} is neither a folder nor an https or ssh address: write it in full, such as https://HOST/OWNER/NAME.")


def _addressed(text: str, scheme: str) -> RegistryAddress:
    if scheme not in ("https", "ssh"):
        raise ConfigError(f"{scheme[:16]}:// is refused: a registry comes by https or ssh, or from a folder given by its path.")
    try:
        address = urlsplit(text)
        host, secret, _ = address.hostname or "", address.password, address.port
    except ValueError:
        raise ConfigError(f"This {scheme} address cannot be read: write {scheme}://HOST/PATH.") from None
    if secret is not None or (scheme == "https" and address.username is not None):
        raise ConfigError(f"The address of {host} has a user or password in it, which others can read: put them into ~/.netrc, or use ssh.")
    option = host.startswith("-") or (address.username or "").startswith("-")
    if not host or option or len(address.path) < 2 or address.query or address.fragment:
        raise ConfigError(f"This {scheme} address names no repository: write {scheme}://HOST/OWNER/NAME.")
    return RegistryAddress(text, scheme)


def fetched(name: str, source: RegistryAddress, folder: Path) -> Registry:
    """The registry at the newest commit of its default branch. folder: an existing one or one to make, for the time that it takes.

    Raises SparkdError where git cannot bring it or it is too large, ConfigError where it has no recipe, StateError for the folder.
    """
    try:
        private_folder(folder)
        scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
    except OSError as error:
        raise StateError(f"{folder}: {error.strerror}. Run this as the user that sparkd runs as.") from None
    try:
        repository = _Repository(scratch, source)
        repository.fetch()
        commit, committed, signature = repository.commit()
        entries = repository.entries(commit)
        chosen, left_out = _chosen(entries, repository)
        recipes, unreadable = _texts(chosen, repository)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not recipes:
        where = f"{MANIFEST}, or a folder {_RECIPES!r}, should lead to files with a `model:`"
        broken = "".join(f" {name} cannot be read: {reason}" for name, reason in list(unreadable.items())[:1])
        raise ConfigError(f"{source.url} has no recipe at {commit[:12]}: {where}.{broken} Give another repository.")
    return Registry(name, source.url, commit, committed, signature, recipes, dict(left_out), unreadable)


def _settings() -> dict[str, str]:
    """The settings of git, as it takes them out of its environment."""
    settings = dict(_SETTINGS)
    if (signers := Path("~/.ssh/allowed_signers").expanduser()).is_file():
        settings["gpg.ssh.allowedSignersFile"] = str(signers)
    environment = {"GIT_CONFIG_COUNT": str(len(settings))}
    for index, (key, value) in enumerate(settings.items()):
        environment |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
    return environment


class _Repository:
    """A bare repository in `folder`, with one commit of `source`."""

    def __init__(self, folder: Path, source: RegistryAddress) -> None:
        self._folder = folder
        self._source = source

    def fetch(self) -> None:
        self._git("init", "--quiet", "--bare", "--template=", str(self._folder), seconds=LOOK_S)
        self._git(
            "fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules", "--", self._source.url, "HEAD",
            seconds=FETCH_S, protocol=self._source.protocol,
        )  # fmt: skip

    def commit(self) -> tuple[str, str, CommitSignature]:
        """(hash, date, signature) of what was fetched."""
        shown = self._git("log", "-1", "--no-mailmap", "--format=%H%n%cI%n%G?%n%GS%n%GK", "FETCH_HEAD", seconds=LOOK_S)
        commit, committed, letter, signer, key = shown.decode(errors="replace").split("\n")[:5]
        if letter == "N" and b"\ngpgsig" in self._git("cat-file", "commit", commit, seconds=LOOK_S, most_bytes=MAX_LISTING_BYTES):
            # git does not even look at a signature by an ssh key where nothing says whose keys count.
            letter = "E"
        if letter not in _STATES:
            wrong = f"the signature of its commit {commit[:12]} is {'revoked' if letter == 'R' else 'wrong'}"
            raise SparkdError(f"{self._source.url}: {wrong}: ask its publisher before you use it.")
        return commit, committed, CommitSignature(_STATES[letter], printable(signer or key)[:200] if letter in "GUXY" else "")

    def entries(self, commit: str) -> list[_Entry]:
        """Every file of the commit."""
        listing = self._git("ls-tree", "-r", "-l", "-z", "--full-tree", commit, seconds=LOOK_S, most_bytes=MAX_LISTING_BYTES)
        entries = list[_Entry]()
        for line in listing.split(b"\0")[:-1]:
            facts, _, path = line.partition(b"\t")
            mode, kind, object_id, size = facts.decode("ascii").split()
            entries.append(_Entry(mode, kind, object_id, int(size) if size.isdigit() else 0, path.decode("utf-8", errors="replace")))
        return entries

    def contents(self, entries: list[_Entry]) -> Iterator[bytes]:
        """The content of each file, in the same order."""
        if not entries:
            return
        wanted = "".join(f"{entry.object_id}\n" for entry in entries).encode("ascii")
        most = sum(entry.size + 100 for entry in entries)
        packed = self._git("cat-file", "--batch", seconds=LOOK_S, stdin=wanted, most_bytes=most)
        start = 0
        for entry in entries:
            start = packed.index(b"\n", start) + 1
            yield packed[start : start + entry.size]
            start += entry.size + 1

    def _git(self, *arguments: str, seconds: float, protocol: str = "none", stdin: bytes = b"", most_bytes: int = 1 << 16) -> bytes:
        """The output of git. Raises SparkdError where it fails, takes longer or writes more."""
        command = ["git", "-P", f"--git-dir={self._folder}", *arguments]
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ} | _ENVIRONMENT | _settings()
        env["GIT_ALLOW_PROTOCOL"] = protocol
        with tempfile.TemporaryFile() as input_file, tempfile.TemporaryFile() as complaint:
            input_file.write(stdin)
            input_file.seek(0)
            try:
                child = subprocess.Popen(
                    command, stdin=input_file, stdout=subprocess.PIPE, stderr=complaint, cwd=self._folder, env=env, start_new_session=True
                )
            except FileNotFoundError:
                raise SparkdError("git is not on this machine, and registries are fetched by it: install it (`apt install git`).") from None
            return self._watched(child, seconds, most_bytes, complaint)

    def _watched(self, child: subprocess.Popen[bytes], seconds: float, most_bytes: int, complaint: Any) -> bytes:
        late = threading.Event()

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

        def stop() -> None:
            late.set()
            kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (MAX_PACK_BYTES, MAX_PACK_BYTES))
                resource.prlimit(child.pid, resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
            with child:
                written = child.stdout.read(most_bytes + 1) if child.stdout else b""
                if len(written) > most_bytes:
                    kill()
        except BaseException:
            kill()
            raise
        finally:
            timer.cancel()
        url = self._source.url
        if late.is_set():
            raise SparkdError(f"{url} took longer than {seconds:g} s: try again, or clone it yourself and give the folder.")
        if len(written) > most_bytes:
            raise SparkdError(f"{url} has more files than a registry of recipes may have. Give another repository.")
        if child.returncode:
            cure = "Check the address, and that `git ls-remote` reaches it"
            if self._source.protocol == "file":
                cure = "Give a git repository that belongs to the user that sparkd runs as: `chown` it, or copy it as that user"
            raise SparkdError(f"{url} cannot be fetched: {self._why(complaint)}. {cure}.")
        return written

    def _why(self, complaint: Any) -> str:
        """git's first line that is no warning. It says nothing of its own limits."""
        if any(path.stat().st_size >= MAX_PACK_BYTES for path in self._folder.rglob("tmp_*")):
            return f"it has more than {MAX_PACK_BYTES >> 20} MiB"
        complaint.seek(0)
        text = complaint.read(1 << 16).decode(errors="replace")
        lines = [line.strip() for line in printable(text).splitlines() if line.strip() and not line.startswith(("warning:", "hint:"))]
        return lines[0].removeprefix("fatal: ").rstrip(".")[:300] if lines else "git says nothing"


def _folders(entries: Mapping[str, _Entry], repository: _Repository) -> list[str]:
    """The folders of sparkrun's manifest, else `recipes` as in eugr's repository, else the whole repository."""
    manifest = entries.get(MANIFEST)
    if manifest is not None and manifest.mode.startswith("100") and manifest.size <= yaml_file.MAX_BYTES:
        (raw,) = repository.contents([manifest])
        rows = yaml_file.parse(raw, MANIFEST, {}, last_counts=True).table.get("registries")
        tables = [row for row in rows if isinstance(row, Mapping) and row.get("enabled") is not False] if isinstance(rows, list) else []
        named = [str(row.get("subpath") or row.get("recipes") or _RECIPES).strip("/") for row in tables]
        if folders := list(dict.fromkeys(folder for folder in named if _PATH.fullmatch(folder))):
            return folders
    return [_RECIPES] if any(path.startswith(f"{_RECIPES}/") for path in entries) else [""]


def _chosen(entries: list[_Entry], repository: _Repository) -> tuple[dict[str, _Entry], Counter[str]]:
    """Name -> file of what may be a recipe, and how many were left out for each reason."""
    chosen, left_out, text_bytes = dict[str, _Entry](), Counter[str](), 0
    seen = set[str]()
    for folder in _folders({entry.path: entry for entry in entries}, repository):
        below = f"{folder}/" if folder else ""
        for entry in entries:
            if entry.path in seen or not (entry.path.startswith(below) and entry.path.endswith(_SUFFIX)):
                continue
            seen.add(entry.path)
            name = entry.path.removeprefix(below).removesuffix(_SUFFIX)
            if not _PATH.fullmatch(name):
                left_out["hidden, or a name that is not plain"] += 1
            elif entry.kind != "blob" or not entry.mode.startswith("100"):
                left_out["a link"] += 1
            elif entry.size > yaml_file.MAX_BYTES:
                left_out[f"larger than {yaml_file.MAX_BYTES >> 10} KiB"] += 1
            elif len(chosen) >= MAX_RECIPES or text_bytes + entry.size > MAX_TEXT_BYTES:
                left_out[f"more than {MAX_RECIPES} files or {MAX_TEXT_BYTES >> 20} MiB"] += 1
            else:
                # A second folder of the manifest may have the same name.
                chosen[name if name not in chosen else entry.path.removesuffix(_SUFFIX)] = entry
                text_bytes += entry.size
    return chosen, left_out


def _texts(chosen: Mapping[str, _Entry], repository: _Repository) -> tuple[dict[str, str], dict[str, str]]:
    """(name -> text of each recipe, name -> why a file is no YAML)."""
    texts, unreadable = dict[str, str](), dict[str, str]()
    for name, raw in zip(chosen, repository.contents(list(chosen.values())), strict=True):
        if problems := yaml_file.parse(raw, "", AsWritten(), last_counts=True).problems:
            line = f"line {problems[0].line}: " if problems[0].line else ""
            unreadable[name] = f"{line}{problems[0].message}"
        elif _RECIPE.search(raw) is not None:  # else a benchmark's or a container's file
            texts[name] = raw.decode("utf-8")
    return texts, unreadable
