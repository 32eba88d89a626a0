"""Whether the tests find faults: one at a time is planted at a random place, and the tests that `make test` has for it are run.

    python -m tests.bench.mutants [--seed N] [--count 40] [--only FOLDER] [--whole]

Kinds: a wrong comparison (also a dropped `not`), swapped arguments of a call, a dropped await, a missing release, and `and` for `or`. A
fault stands in a copy of the working tree, never in the checkout. First the folder of tests that mirrors the module's runs, then every
other test file that imports the module, with --whole then all tests. A fault that lets a test hang is found. The test that finds a fault
(its whole run, where no test is named) is run once more without it: if it fails again, it has found nothing (UNSURE). Exit status 1: fewer
than 38 of 40 were found.
"""

from __future__ import annotations

import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.arguments import Parser, amount, count
from tests.support.daemon_process import ROOT

FOLDERS = ("sparkd/control", "sparkd/gateway", "workers/guard", "workers/load", "workers/kv")
KINDS = ("comparison", "arguments", "await", "release", "boolean")
BAR = 38 / 40
OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
RELEASES = {"release", "close", "remove", "discard", "unlink", "free", "cancel", "pop"}
# The order of their arguments means nothing, or no test would be needed to see that it is wrong.
UNORDERED = {"min", "max", "compare_digest", "isinstance", "issubclass"}
LOGS = {"debug", "info", "warning", "error", "exception", "critical"}
# No GPU is here: what only a GPU runs would survive every test.
LEFT_OUT = re.compile(r"kernels\.py$")
INTERRUPT_S = 60.0
# No test takes so long on two cores that do nothing else.
TEST_LIMIT_S = 120
_FOUND = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: `text` in the place of the bytes from `start` to `end` of the file."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    text: str

    def __str__(self) -> str:
        change = f"{' '.join(self.before.split())[:60]} -> {' '.join(self.text.split())[:60]}"
        return f"{self.path}:{self.line}  {self.kind}  {change}"


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    data = source.encode()
    for node in _nodes(ast.parse(source)):
        for kind, text in _faults(node):
            start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            yield Mutant(path, node.lineno, kind, start, end, data[start:end].decode(), text)  # type: ignore[attr-defined]


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Whatever runs and is no word for people: no annotations, log lines and f-strings."""
    if isinstance(node, ast.JoinedStr) or _is_dull(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _is_dull(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__")
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value.func) in LOGS


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _faults(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, the expression or statement in its place)"""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield "comparison", f"({ast.unparse(ast.Compare(node.left, [OPPOSITES[type(node.ops[0])]()], node.comparators))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "comparison", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "boolean", f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.Call) and len(node.args) > 1 and _name(node.func) not in UNORDERED:
        first, second = node.args[:2]
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred) and ast.dump(first) != ast.dump(second):
            yield "arguments", ast.unparse(ast.Call(node.func, [second, first, *node.args[2:]], node.keywords))
    elif isinstance(node, ast.Await):
        yield "await", f"({ast.unparse(node.value)})"
    elif isinstance(node, ast.Expr):
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and _name(call.func).strip("_").partition("_")[0] in RELEASES:
            yield "release", "pass"


def chosen(folders: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """Folder by folder in turn, of each a random kind that it has, and of that a random place."""
    rng = random.Random(seed)
    every: dict[str, dict[str, list[Mutant]]] = {}
    for folder in folders:
        by_kind: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not LEFT_OUT.search(path.name):
                for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")):
                    by_kind[mutant.kind].append(mutant)
        every[folder] = by_kind
    found = []
    for turn in range(number):
        by_kind = every[folders[turn % len(folders)]]
        places = by_kind[rng.choice([kind for kind in KINDS if by_kind[kind]])]
        found.append(places.pop(rng.randrange(len(places))))
    return found


def copied(into: Path) -> None:
    """The working tree as git sees it, with what is installed beside it."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    for name in (".venv", ".sparkd", "tests/web/node_modules"):
        if (ROOT / name).exists() and not (into / name).exists():
            (into / name).symlink_to((ROOT / name).resolve())


def stages(tree: Path, path: str, *, whole: bool) -> Iterator[list[str]]:
    """What pytest gets, one after the other."""
    mirror = next(folder for folder in (tree / "tests" / path).parents if folder.is_dir())
    yield [str(mirror.relative_to(tree))]
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    names = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    others = [test for test in sorted((tree / "tests").rglob("test_*.py")) if mirror not in test.parents and names.search(test.read_text())]
    if others:
        yield [str(test.relative_to(tree)) for test in others]
    if whole:
        yield ["-n", str((os.cpu_count() or 1) + 1), "--dist", "loadfile", "tests"]


def failure(tree: Path, targets: Sequence[str], limit_s: float) -> str | None:
    """The test that failed, or how the run ended that names none; None where all passed."""
    flags = ("-x", "-q", "-m", "not rest", f"--timeout={TEST_LIMIT_S}", "-p", "no:cacheprovider", "--tb=no")
    command = [sys.executable, "-m", "pytest", *flags, *targets]
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with (tree / "mutant.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"the limit of {limit_s:.0f} s"
        finally:
            _end(process)
        log.seek(0)
        text = log.read()
    if code in (0, 5):  # 5: no test was chosen
        return None
    seen = _FOUND.search(text)
    return seen[1] if seen else f"pytest's status {code}: {' '.join(text.split())[-200:]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that tests end what they have started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(INTERRUPT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def verdict(tree: Path, mutant: Mutant, number: int, *, whole: bool, limit_s: float) -> str:
    original, file = (ROOT / mutant.path).read_bytes(), tree / mutant.path
    file.write_bytes(original[: mutant.start] + mutant.text.encode() + original[mutant.end :])
    # Python tells by its time whether a file was compiled before.
    os.utime(file, (number, number))
    by, targets = None, list[str]()
    for targets in stages(tree, mutant.path, whole=whole):
        by = failure(tree, targets, limit_s)
        if by is not None:
            break
    shutil.copy2(ROOT / mutant.path, file)
    if by is None:
        return "SURVIVED"
    if failure(tree, [by] if "::" in by else targets, limit_s) is not None:
        return f"UNSURE   {by} fails without it, too"
    return f"found    {by}"


def main() -> int:
    parser = Parser("tests.bench.mutants", __doc__, count=1, only="workers/guard", whole=False)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=count, default=40)
    parser.add_argument("--only", choices=FOLDERS, metavar="FOLDER", help=", ".join(FOLDERS))
    parser.add_argument("--whole", action="store_true", help="run all tests for what survives the others")
    parser.add_argument("--limit-s", type=amount, default=1800.0, help="for one run of tests; what takes longer hangs")
    given = parser.parse_args()
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="sparkd-mutants-") as folder:
        tree = Path(folder)
        copied(tree)
        for number, mutant in enumerate(chosen([given.only] if given.only else FOLDERS, given.count, given.seed), 1):
            began_s = time.monotonic()
            verdicts.append(verdict(tree, mutant, number, whole=given.whole, limit_s=given.limit_s))
            print(f"{number:>3}  {verdicts[-1]}\n     {mutant}  ({time.monotonic() - began_s:.0f} s)", flush=True)
    found = sum(one.startswith("found") for one in verdicts)
    print(f"{found} of {len(verdicts)} found")
    return 1 if found < BAR * len(verdicts) and not given.smallest else 0


if __name__ == "__main__":
    sys.exit(main())
