"""Owns the libraries of the web page: fetches their packages, checks them by hash, writes their modules with relative imports.

python deploy/vendor.py            write sparkd/web/static/vendor anew from the packages (needs npm)
python deploy/vendor.py --check    compare that folder with the recorded hashes (needs neither npm nor a network)
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "sparkd" / "web" / "static" / "vendor"
_SPECIFIER = re.compile(r'(\bfrom\s*|\bimport\s*)"([^"./][^"]*)"')
_SOURCE_MAP = re.compile(r"\n//# sourceMappingURL=\S*\s*$")


@dataclass(frozen=True, slots=True)
class Package:
    """sha256: of its tarball. files: of its members, by the names that they get here. suffix: what makes a script a module."""

    name: str
    version: str
    sha256: str
    files: Mapping[str, str]
    suffix: Mapping[str, str] = field(default_factory=dict)


PACKAGES = (
    Package(
        "preact",
        "11.2.0",
        "3c4456766bd32b6b534d52bf4e9c2a29b33e7eedf6e96ed479300ba1a7888ebf",
        {"preact.js": "dist/preact.mjs", "hooks.js": "hooks/dist/hooks.mjs", "preact.LICENSE": "LICENSE"},
    ),
    Package(
        "htm",
        "3.1.1",
        "2425b9bee11409177bcabc7f32e319926fc6690c1701c0b257c88bdff2d5ba90",
        {"htm.js": "dist/htm.mjs", "htm.LICENSE": "LICENSE"},
    ),
    Package(
        "@preact/signals-core",
        "1.14.5",
        "94c421ac996214c94f532fb4c43d8ede048a16df0cd9538ffb965174dbe8daba",
        {"signals-core.js": "dist/signals-core.mjs", "signals-core.LICENSE": "LICENSE"},
    ),
    Package(
        "@preact/signals",
        "2.11.4",
        "66ea8221dd8aaa0da2365d49c3f116b071d56cfb63b2e16c072c6b4e08a928b7",
        {"signals.js": "dist/signals.mjs", "signals.LICENSE": "LICENSE"},
    ),
    # Its module is not minified: 42 kB compressed, and the script 22 kB.
    Package(
        "uplot",
        "1.6.32",
        "4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d",
        {"uplot.js": "dist/uPlot.iife.min.js", "uplot.css": "dist/uPlot.min.css", "uplot.LICENSE": "LICENSE"},
        {"uplot.js": "\nexport default uPlot;\n"},
    ),
)
# A bare import of a package, and the file here that it becomes.
MODULES: Mapping[str, str] = {
    "preact": "preact.js",
    "preact/hooks": "hooks.js",
    "htm": "htm.js",
    "@preact/signals-core": "signals-core.js",
    "@preact/signals": "signals.js",
}
WRITTEN_SHA256: Mapping[str, str] = {
    "preact.js": "225d7a773766e6fb2cfcc45274fe41d2059f5782f3f2c4569aa5132a2d3a2902",
    "hooks.js": "5c65ab263688d0805862fd0807c779af02c2799c44fda0873dfcb870d0da70a0",
    "preact.LICENSE": "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    "htm.js": "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
    "htm.LICENSE": "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    "signals-core.js": "0c80bc127d72ecb1496ef116ffddae75079829a3af01e7f417c8e5a6474c68b6",
    "signals-core.LICENSE": "a11fc89e4c6b118854c7a667734a0b2e6bf2af5e45c6686de31adbccc8f3ae8d",
    "signals.js": "67f80b573d7d2c4069a15c4d473dbba2c5fadcb01064e7f56893032f67bcd097",
    "signals.LICENSE": "a11fc89e4c6b118854c7a667734a0b2e6bf2af5e45c6686de31adbccc8f3ae8d",
    "uplot.js": "8301d1a4fcc08355d4ff7e8c87cc4a4e13cc4da93ba50a20816005488c0c5f6e",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def main() -> int:
    options = argparse.ArgumentParser(description="The libraries of the web page.")
    options.add_argument("--check", action="store_true", help="compare the files with their recorded hashes")
    if options.parse_args().check:
        problems = [*problems_of(FOLDER)]
        print("\n".join(problems) or f"{len(WRITTEN_SHA256)} files are as recorded.")
        return 1 if problems else 0
    with tempfile.TemporaryDirectory() as folder:
        contents = {name: content for package in PACKAGES for name, content in _members(package, Path(folder))}
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for name, content in contents.items():
        (FOLDER / name).write_bytes(content)
        print(f'    "{name}": "{hashlib.sha256(content).hexdigest()}",')
    problems = [*problems_of(FOLDER)]
    print("\n".join(problems) or "The files are as recorded.")
    return 1 if problems else 0


def problems_of(folder: Path) -> Iterator[str]:
    """A line for each file that is missing, foreign or not as recorded."""
    present = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} if folder.is_dir() else {}
    for name in sorted(present.keys() | WRITTEN_SHA256.keys()):
        if name not in WRITTEN_SHA256:
            yield f"{name}: it is not recorded. Remove it, or record it in deploy/vendor.py."
        elif present.get(name) != WRITTEN_SHA256[name]:
            state = "it is missing" if name not in present else "its hash is another than the recorded one"
            yield f"{name}: {state}. Run `python deploy/vendor.py`."


def module_text(text: str) -> str:
    """A module whose imports name files of its own folder, without its source map."""

    def relative(match: re.Match[str]) -> str:
        return f'{match[1]}"./{MODULES[match[2]]}"'

    return _SPECIFIER.sub(relative, _SOURCE_MAP.sub("\n", text))


def _members(package: Package, folder: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a package as they are written. SystemExit where its tarball is another than the recorded one."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package.name}@{package.version}"]
    output = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    tarball = folder / output.strip().splitlines()[-1]
    digest = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if digest != package.sha256:
        sys.exit(f"{package.name} {package.version} has the SHA-256 {digest}, and {package.sha256} is recorded. Nothing was written.")
    with tarfile.open(tarball) as archive:
        for name, member in package.files.items():
            stored = archive.extractfile(f"package/{member}")
            if stored is None:
                sys.exit(f"{package.name} {package.version} has no file {member}. Nothing was written.")
            content = stored.read()
            if name.endswith(".js"):
                content = (module_text(content.decode()) + package.suffix.get(name, "")).encode()
            yield name, content


if __name__ == "__main__":
    sys.exit(main())
