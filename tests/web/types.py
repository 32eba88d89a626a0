"""The types that the page is checked against: those of the admin API's document, as TypeScript.

python -m tests.web.types      writes tests/web/types/admin.d.ts; needs `npm ci` in tests/web
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sparkd.admin.app import admin_app
from tests.support.admin_parts import parts_of

FOLDER = Path(__file__).parent
TOOLS = FOLDER / "node_modules" / ".bin"
WRITTEN = FOLDER / "types" / "admin.d.ts"


def document() -> dict[str, Any]:
    """The admin API's OpenAPI document. Its routes are never called, so nothing stands behind them."""
    nothing = cast(Any, SimpleNamespace(want=None, boundary=None))
    return admin_app(nothing, nothing, nothing, nothing, parts_of()).openapi()


def write() -> None:
    """Write the types. Raises CalledProcessError with what the tool says."""
    source = WRITTEN.with_suffix(".json")
    source.write_text(json.dumps(document()))
    subprocess.run([TOOLS / "openapi-typescript", source, "--output", WRITTEN], cwd=FOLDER, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    write()
