"""What lies on a node's disks of models: listed, verified and removed by name, and nothing else is touched."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from sparkd.errors import RankError
from workers.agent.storage import Storage

CONTENT = b"weights" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
PROFILE = "0123456789abcdef01234567"


class Node(Storage):
    def __init__(self, folder: Path) -> None:
        self.node_id = "n"
        self._cache_dir = self._kv_dir = None
        self.environ = {"HF_HUB_CACHE": str(folder / "hub")}
        self.folders = {"quantized": str(folder / "quantized"), "profile": str(folder / "profiles")}

    @property
    def where(self) -> tuple[dict[str, str], dict[str, str]]:
        return self.folders, self.environ


@pytest.fixture
def node(tmp_path: Path) -> Node:
    model = tmp_path / "hub/models--org--tiny"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots/c0ffee").mkdir(parents=True)
    (model / "blobs" / DIGEST).write_bytes(CONTENT)
    (model / "snapshots/c0ffee/model.safetensors").symlink_to(f"../../blobs/{DIGEST}")
    (tmp_path / "hub/version.txt").write_text("1")
    (tmp_path / "quantized/tiny-nvfp4-0123456789abcdef").mkdir(parents=True)
    (tmp_path / "quantized/tiny-nvfp4-0123456789abcdef/model.safetensors").write_bytes(b"x" * 50)
    (tmp_path / "profiles").mkdir()
    (tmp_path / f"profiles/{PROFILE}.json").write_text("{}")
    return Node(tmp_path)


def test_what_there_is(node: Node) -> None:
    stored = node.stored(*node.where)
    by_kind = {entry["kind"]: entry for entry in stored["entries"]}
    assert {kind: (entry["id"], entry["size_bytes"]) for kind, entry in by_kind.items()} == {
        "hub": ("models--org--tiny", len(CONTENT)),
        "quantized": ("tiny-nvfp4-0123456789abcdef", 50),
        "profile": (PROFILE, 2),
    }
    assert (by_kind["hub"]["name"], by_kind["hub"]["source"], by_kind["hub"]["fault"]) == ("org/tiny", "org/tiny", None)
    assert by_kind["quantized"]["fault"], "it has no manifest"
    assert [(folder["kind"], folder["size_bytes"]) for folder in stored["folders"]] == [
        ("hub", len(CONTENT)),
        ("quantized", 50),
        ("profile", 2),
    ]
    assert all(folder["free_bytes"] > 0 for folder in stored["folders"])


def test_a_node_without_any_of_it(tmp_path: Path) -> None:
    empty = Node(tmp_path / "nowhere")
    assert empty.stored(*empty.where)["entries"] == []


def test_a_half_download_is_told(node: Node, tmp_path: Path) -> None:
    (tmp_path / "hub/models--org--tiny/blobs/abc.incomplete").write_bytes(b"x")
    hub = next(entry for entry in node.stored(*node.where)["entries"] if entry["kind"] == "hub")
    assert "half downloaded" in hub["fault"]


def test_a_file_with_other_bytes_is_found(node: Node, tmp_path: Path) -> None:
    assert node.verify_stored("hub", "models--org--tiny", *node.where) is None
    (tmp_path / "hub/models--org--tiny/blobs" / DIGEST).write_bytes(CONTENT[:-1] + b"X")
    fault = node.verify_stored("hub", "models--org--tiny", *node.where)
    assert fault is not None
    assert DIGEST[:16] in fault
    assert node.verify_stored("quantized", "tiny-nvfp4-0123456789abcdef", *node.where) is not None
    assert node.verify_stored("profile", PROFILE, *node.where) is None


@pytest.mark.parametrize(
    ("kind", "name", "size", "path"),
    [
        ("hub", "models--org--tiny", len(CONTENT), "hub/models--org--tiny"),
        ("quantized", "tiny-nvfp4-0123456789abcdef", 50, "quantized/tiny-nvfp4-0123456789abcdef"),
        ("profile", PROFILE, 2, f"profiles/{PROFILE}.json"),
    ],
)
def test_one_entry_is_removed(node: Node, tmp_path: Path, kind: str, name: str, size: int, path: str) -> None:
    assert node.remove_stored(kind, name, *node.where) == size
    assert not (tmp_path / path).exists()
    assert len(node.stored(*node.where)["entries"]) == 2
    with pytest.raises(RankError):
        node.remove_stored(kind, name, *node.where)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("hub", name) for name in ("version.txt", "..", "models--..", "models--a/../../x", "")),
        *(("quantized", name) for name in ("../hub", ".")),
        *(("profile", "../../x"), ("logs", "m.log")),
    ],
)
def test_no_other_name_reaches_a_file(node: Node, kind: str, name: str) -> None:
    for act in (node.remove_stored, node.verify_stored):
        with pytest.raises(RankError):
            act(kind, name, *node.where)  # type: ignore[operator]


def test_a_link_is_not_followed(node: Node, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("mine")
    (tmp_path / "hub/models--org--link").symlink_to(tmp_path / "precious")
    with pytest.raises(RankError):
        node.remove_stored("hub", "models--org--link", *node.where)
    assert (tmp_path / "precious/file").read_text() == "mine"
