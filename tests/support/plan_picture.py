"""Draws deploy/pictures/plan.svg: the screen of a real `sparkd plan` of a published model's headers.

python -m tests.support.plan_picture [FILE]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.support.checkpoints import write
from tests.support.published_headers import checkpoint_of, config_of

ROOT = Path(__file__).resolve().parents[2]
FIXTURE, MODEL = "qwen3.5-122b-a10b", "Qwen/Qwen3.5-122B-A10B"
OPTIONS = ("--nodes", "2", "--ctx", "32768", "--seqs", "4", "--quick")
COLUMNS = 132
# rich's own template fetches a font from another host.
TEMPLATE = """<svg viewBox="0 0 {terminal_width} {terminal_height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
<rect width="{terminal_width}" height="{terminal_height}" rx="8" fill="#1b1f24"/>
<g transform="translate(14, 14)" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def screen() -> str:
    """What a terminal of COLUMNS columns shows, with its colours. Raises subprocess.CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in checkpoint_of(FIXTURE).tensors.items()}
        write(Path(folder) / MODEL, config_of(FIXTURE), tensors)
        environment = os.environ | {"COLUMNS": str(COLUMNS - 4), "FORCE_COLOR": "1", "XDG_CACHE_HOME": folder, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "sparkd", "plan", MODEL, *OPTIONS]
        shown = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    return shown.replace(f"{folder}/", "").replace(sys.executable, "/opt/sparkd/bin/python")


def main() -> None:
    shown = Text.from_ansi(screen()).split("\n")
    # The entry and the commands below the bars are for a reader with a keyboard.
    end = next((number for number, line in enumerate(shown) if line.plain.startswith("In sparkd.yaml")), len(shown))
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text(f"$ sparkd plan {MODEL} {' '.join(OPTIONS)}", style="bold"))
        for line in shown[:end]:
            console.print(line, width=COLUMNS - 4)
        svg = console.export_svg(title=escape(MODEL), code_format=TEMPLATE, unique_id="plan")
    Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "deploy/pictures/plan.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
