"""Reads the API keys from literals, files and systemd credentials, and keeps their SHA-256 digests and names alone."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, SecretStr

from sparkd.config.fields import AbsolutePath, Section, one_or_many
from sparkd.config.yaml_file import ConfigProblem
from sparkd.errors import ConfigError
from workers.host import regular_file

SHORT_KEY = 16
_KEY = re.compile(r"[!-~]{1,512}")
_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}")
# A key holds no space, so a colon with one behind it ends a name.
_NAMED = re.compile(r"(?!sha256:)([A-Za-z0-9][A-Za-z0-9._@-]{0,63}):[ \t]+(.*)")
_MAX_FILE_BYTES = 1024 * 1024


def _lines(value: Any) -> Any:
    """Write what YAML reads as a map of one pair, NAME: KEY, as the line that it was."""
    values = one_or_many(value)
    return [_line(item) for item in values] if isinstance(values, list | tuple) else values


def _line(item: Any) -> Any:
    if not isinstance(item, Mapping) or len(item) != 1:
        return item
    [(name, key)] = item.items()
    return f"{name}: {key}" if isinstance(key, str) else item


Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_lines)]


class KeySettings(Section):
    """The keys of those who may call: inference keys open /v1, admin keys open /admin.

    A value is a key, or 'sha256:HEX' of one; 'NAME: ' may stand in front of either.
    """

    inference: Secrets = ()
    admin: Secrets = ()
    inference_file: AbsolutePath | None = None
    admin_file: AbsolutePath | None = None


@dataclass(frozen=True, slots=True)
class KeyRing:
    """SHA-256 digests (32 bytes each) of the keys that are accepted, with the name of each, and what is unwise about where they came from.

    A key without a name is called by its role and place, such as inference-2 for the second one.
    """

    inference: Mapping[bytes, str]
    admin: Mapping[bytes, str]
    warnings: tuple[ConfigProblem, ...] = ()


def load_keys(keys: KeySettings, environ: Mapping[str, str]) -> KeyRing:
    """Collects every key. systemd's credentials are read from $CREDENTIALS_DIRECTORY/inference.key and admin.key where they exist.

    Raises ConfigError for a file that cannot be read and for text that cannot be a key; neither message shows a key.
    """
    warnings: list[ConfigProblem] = []
    return KeyRing(
        inference=_by_digest("inference", _role("inference", keys.inference, keys.inference_file, environ, warnings)),
        admin=_by_digest("admin", _role("admin", keys.admin, keys.admin_file, environ, warnings)),
        warnings=tuple(warnings),
    )


def _by_digest(role: str, named: Iterable[tuple[str | None, bytes]]) -> dict[bytes, str]:
    """The first name of a key that is given twice counts."""
    names: dict[bytes, str] = {}
    for place, (name, digest) in enumerate(named, start=1):
        names.setdefault(digest, name or f"{role}-{place}")
    return names


def _role(
    role: str, literals: Iterable[SecretStr], file: Path | None, environ: Mapping[str, str], warnings: list[ConfigProblem]
) -> Iterator[tuple[str | None, bytes]]:
    """The name and the digest of each key, in order."""
    for literal in literals:
        yield _named(literal.get_secret_value(), f"keys.{role}", None, warnings)
    if file is not None:
        yield from _from_file(file, warnings)
    folder = environ.get("CREDENTIALS_DIRECTORY")
    if folder and (credential := Path(folder) / f"{role}.key").is_file():
        yield from _from_file(credential, warnings)


def _from_file(path: Path, warnings: list[ConfigProblem]) -> Iterator[tuple[str | None, bytes]]:
    try:
        status, raw = path.stat(), regular_file.read(path, _MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ConfigError("This is not a file of keys: one key per line, '#' begins a comment.", file=str(path))
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The key file cannot be read: {reason}. Create it, or let this user read it.", file=str(path)) from None
    if status.st_mode & stat.S_IROTH:
        warnings.append(ConfigProblem(str(path), None, "Every user of this machine can read this key file: chmod 640 or less.", "warning"))
    for number, line in enumerate(text.splitlines(), start=1):
        if (key := line.strip()) and not key.startswith("#"):
            yield _named(key, str(path), number, warnings)


def _named(text: str, file: str, line: int | None, warnings: list[ConfigProblem]) -> tuple[str | None, bytes]:
    match = _NAMED.fullmatch(text)
    return (match[1], _digest(match[2], file, line, warnings)) if match else (None, _digest(text, file, line, warnings))


def _digest(key: str, file: str, line: int | None, warnings: list[ConfigProblem]) -> bytes:
    if _DIGEST.fullmatch(key):
        return bytes.fromhex(key.removeprefix("sha256:"))
    if key.startswith("sha256:") or not _KEY.fullmatch(key):
        raise ConfigError(
            "A key is 1 to 512 visible ASCII characters, or 'sha256:' and 64 hex digits, with 'NAME: ' in front if you like; one here is "
            "neither.",
            file=file,
            line=line,
        )
    if len(key) < SHORT_KEY:
        warnings.append(
            ConfigProblem(file, line, f"A key has fewer than {SHORT_KEY} characters and can be guessed: take a longer one.", "warning")
        )
    return hashlib.sha256(key.encode()).digest()
