"""Where API keys come from, and that they go nowhere else."""

import hashlib
from pathlib import Path

import pytest
from pydantic import SecretStr

from sparkd.config.api_keys import KeySettings, load_keys
from sparkd.errors import ConfigError

LONG = "sk-0123456789abcdef"


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_literals_digests_files_and_credentials(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"# users\n{LONG}-1\n\n  {LONG}-2  \nsha256:{digest('third').hex().upper()}\n")
    write(tmp_path / "inference.key", f"{LONG}-4\n")
    write(tmp_path / "admin.key", "\n")
    keys = KeySettings(inference=(SecretStr(LONG),), admin=(SecretStr("sha256:" + digest("admin").hex()),), inference_file=file)

    ring = load_keys(keys, {"CREDENTIALS_DIRECTORY": str(tmp_path)})

    assert ring.inference == {digest(LONG), digest(LONG + "-1"), digest(LONG + "-2"), digest("third"), digest(LONG + "-4")}
    assert ring.admin == {digest("admin")}
    assert ring.warnings == ()


def test_no_key_is_no_key() -> None:
    assert load_keys(KeySettings(), {}).inference == frozenset()
    assert load_keys(KeySettings(), {"CREDENTIALS_DIRECTORY": "/nowhere"}).admin == frozenset()


def test_loose_rights_and_short_keys_are_warnings(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "short\n", 0o644)

    first, second = load_keys(KeySettings(admin_file=file), {}).warnings
    assert (first.file, first.severity) == (str(file), "warning")
    assert "chmod 640" in first.message
    assert (second.line, second.severity) == (1, "warning")
    assert "short" not in second.message


@pytest.mark.parametrize("text", ["two words", "sha256:12", "k" * 513, "ключ", "a\x7fb"])
def test_what_cannot_be_a_key(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "keys", f"{LONG}\n{text}\n")

    with pytest.raises(ConfigError) as caught:
        load_keys(KeySettings(inference_file=file), {})
    assert str(caught.value).startswith(f"{file}:2: ")
    assert text not in str(caught.value)
    with pytest.raises(ConfigError, match=r"keys\.admin") as caught:
        load_keys(KeySettings(admin=(SecretStr(text),)), {})
    assert text not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "", "binary"):
        with pytest.raises(ConfigError) as caught:
            load_keys(KeySettings(admin_file=tmp_path / name), {})
        assert caught.value.file == str(tmp_path / name)


def test_nothing_prints_a_key() -> None:
    keys = KeySettings(inference=(SecretStr(LONG),))

    assert LONG not in f"{keys!r} {keys} {keys.model_dump()} {keys.model_dump_json()}"
    assert LONG not in repr(load_keys(keys, {}))
