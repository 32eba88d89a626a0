"""What sparkd prints is what the golden files hold; `python -m tests.golden --update` takes a new wording over."""

from __future__ import annotations

from pathlib import Path

from tests.golden.outputs import FOLDER, KINDS, outputs


def test_the_output_is_that_of_the_golden_files(tmp_path: Path) -> None:
    printed = dict(outputs(tmp_path))
    kept = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.txt")}

    assert set(kept) == {f"{name}.txt" for name in KINDS}
    for name, text in printed.items():
        assert text == kept[name], f"{name}: `python -m tests.golden` shows the difference, with --update it is the new wording"
