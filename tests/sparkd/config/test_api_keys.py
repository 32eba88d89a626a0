"""Where API keys come from, and that they go nowhere else."""

import hashlib
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

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

    assert set(ring.inference) == {digest(LONG), digest(LONG + "-1"), digest(LONG + "-2"), digest("third"), digest(LONG + "-4")}
    assert set(ring.admin) == {digest("admin")}
    assert ring.warnings == ()


def test_names_of_keys(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"# users\nphone: {LONG}-1\n{LONG}-2\nci.main:\tsha256:{digest('third').hex()}\ntablet: {LONG}-1\n")
    raw = {"inference": [{"laptop": LONG}, f"desk: {LONG}-0", LONG + "-9", "not:a-name-" + LONG], "inference_file": str(file)}

    ring = load_keys(KeySettings.model_validate(raw), {})

    assert ring.inference == {
        digest(LONG): "laptop",
        digest(LONG + "-0"): "desk",
        digest(LONG + "-9"): "inference-3",
        digest("not:a-name-" + LONG): "inference-4",
        digest(LONG + "-1"): "phone",
        digest(LONG + "-2"): "inference-6",
        digest("third"): "ci.main",
    }
    assert load_keys(KeySettings.model_validate({"admin": f"boss: {LONG}"}), {}).admin == {digest(LONG): "boss"}


def test_what_is_no_name(tmp_path: Path) -> None:
    for text in (f"sha256: {digest(LONG).hex()}", f"two words: {LONG}", f"{'n' * 65}: {LONG}", f"-x: {LONG}", "name: ", "name: two words"):
        with pytest.raises(ConfigError) as caught:
            load_keys(KeySettings(admin=(SecretStr(text),)), {})
        assert LONG not in str(caught.value)
    for value in ({"laptop": LONG, "phone": LONG}, {"laptop": 7}, {}):
        with pytest.raises(ValidationError):
            KeySettings.model_validate({"inference": [value]})


def test_loose_rights_and_short_keys_are_warnings(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", "short\n", 0o644)

    first, second = load_keys(KeySettings(admin_file=file), {}).warnings
    assert (first.file, first.severity) == (str(file), "warning")
    assert "chmod 640" in first.message
    assert (second.line, second.severity) == (1, "warning")
    assert "short" not in second.message


@pytest.mark.parametrize("text", ["two words", "sha256:12", "k" * 513, "ключ"])
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
    assert load_keys(KeySettings(), {"CREDENTIALS_DIRECTORY": "/nowhere"}).admin == {}, "no key is no key"
    for name in ("missing", "", "binary"):
        with pytest.raises(ConfigError) as caught:
            load_keys(KeySettings(admin_file=tmp_path / name), {})
        assert caught.value.file == str(tmp_path / name)


def test_nothing_prints_a_key() -> None:
    keys = KeySettings(inference=(SecretStr(LONG),))

    assert LONG not in f"{keys!r} {keys} {keys.model_dump()} {keys.model_dump_json()}"
    assert LONG not in repr(load_keys(keys, {}))
