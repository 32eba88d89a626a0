"""Compares what sparkd prints with the golden files: python -m tests.golden [--update]. Exit code 1: they differ."""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
from pathlib import Path

from tests.golden.outputs import FOLDER, outputs


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.golden", description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the files anew; `git diff` shows what changed")
    update, differ = parser.parse_args().update, 0
    with tempfile.TemporaryDirectory() as folder:
        for name, text in outputs(Path(folder)):
            file = FOLDER / name
            before = file.read_text(encoding="utf-8") if file.exists() else ""
            lines = difflib.unified_diff(before.splitlines(), text.splitlines(), f"{name} as kept", f"{name} as printed", lineterm="")
            if diff := list(lines):
                differ = 1
                print("\n".join(diff))
            if update:
                file.write_text(text, encoding="utf-8")
    return 0 if update else differ


if __name__ == "__main__":
    sys.exit(main())
