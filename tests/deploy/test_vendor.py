"""The page's libraries: as recorded, and with imports that need no resolver."""

from __future__ import annotations

from pathlib import Path

from deploy.vendor import FOLDER, MODULES, PACKAGES, WRITTEN_SHA256, problems_of


def test_the_files_are_as_recorded() -> None:
    assert [*problems_of(FOLDER)] == []
    assert {name for package in PACKAGES for name in package.files} == WRITTEN_SHA256.keys()


def test_a_changed_a_missing_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    for path in FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "htm.js").write_text("export default 1;")
    (tmp_path / "hooks.js").unlink()
    (tmp_path / "other.js").write_text("")
    assert [problem.partition(":")[0] for problem in problems_of(tmp_path)] == ["hooks.js", "htm.js", "other.js"]


def test_every_library_has_its_licence_and_only_relative_imports() -> None:
    assert {path.stem for path in FOLDER.glob("*.LICENSE")} == {"preact", "htm", "signals", "signals-core", "uplot"}
    for name in MODULES.values():
        assert 'from"@' not in (FOLDER / name).read_text()
