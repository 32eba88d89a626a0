"""How far predictions are from what is measured, and from what others published: tables of both, side by side. Never asserts; it prints.

    python -m tests.bench.footprint [--preset cpu|h200] [--quantize FORMAT] [--only REGEX] [--json FILE] [--logs FOLDER] [--limit-s N]
        [--segments]
    python -m tests.bench.footprint --published [--only REGEX] [--json FILE]

Measured: every architecture of tests/support/architectures.py as it is stored and in a 4-bit format, each through a real engine in a
process of its own, one at a time (footprint_measured.py). Bars: weights within 1 %, bytes per token of cache exact, the most that the
engine took under the largest prefill within 5 % or 300 MiB. --published: without an engine, against tests/fixtures/published.yaml and
totals.yaml (footprint_published.py). Exit status 1: a bar was missed. On a machine without vLLM in its environment: PYTHONPATH=SITE:$PWD.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.bench import child
from tests.bench.arguments import Parser, amount, new, pattern
from tests.bench.footprint_table import Row, summary, table


def main() -> int:
    parser = Parser("tests.bench.footprint", __doc__, only="^(llama bf16|Qwen3.6-35B-A3B-NVFP4)$")
    parser.add_argument("--published", action="store_true", help="against published figures, without an engine")
    parser.add_argument("--preset", choices=("cpu", "h200"), default="cpu")
    parser.add_argument("--quantize", help="the 4-bit format; the preset has its own")
    parser.add_argument(
        "--only", type=pattern, default="", help="a regular expression: architecture and format, or the published model's name"
    )
    parser.add_argument("--json", type=new, help="file for all rows")
    parser.add_argument("--logs", type=new, help="folder for the engines' logs")
    parser.add_argument("--limit-s", type=amount, default=600.0, help="for one engine")
    parser.add_argument("--segments", action="store_true", help="on a GPU: also print what torch reserves, and for which call")
    given = parser.parse_args()
    if given.segments:
        os.environ["SPARKD_BENCH_SEGMENTS"] = "1"
    found = _published(given.only) if given.published else _measured(given)
    if not found:
        parser.error(f"argument --only: {given.only!r} matches nothing")
    print(f"\n{table(found)}\n\n{summary(found)}")
    if given.json:
        given.json.write_text(json.dumps([row.to_json() for row in found], indent=1), encoding="utf-8")
    return 1 if not given.smallest and any(row.passed is False for row in found) else 0


def _published(only: str) -> list[Row]:
    from tests.bench.footprint_published import rows

    return list(rows(only))


def _measured(given: argparse.Namespace) -> list[Row]:
    from tests.bench.footprint_measured import PRESETS, rows

    child.end_with_children()
    found = []
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        logs = given.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for row in rows(PRESETS[given.preset], given.only, given.quantize, Path(temporary), logs, given.limit_s):
            print(f"{row.what}: {row.case}: {row.predicted} predicted, {row.measured} measured {row.unit} {row.note}", flush=True)
            found.append(row)
    return found


if __name__ == "__main__":
    sys.exit(main())
