"""Makes the folder from which a foreign interpreter imports the plugin's two packages, and no other of sparkd's environment."""

from __future__ import annotations

import os
from pathlib import Path

from sparkd import errors

_SHOWN = {"workers": Path(__file__).resolve().parents[1], "sparkd": Path(errors.__file__).resolve().parent}
# A distribution's metadata folder, by which vLLM finds the entry points without an installation. Its name and version differ from those of
# sparkd's own distribution; the entry points have the same names.
_DISTRIBUTION = "sparkd_plugin-0.dist-info"
_FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: sparkd-plugin\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\nsparkd = workers.plugin:register\n\n"
    "[vllm.platform_plugins]\nsparkd = workers.vllm.ray.engine:platform\n",
}


def expose(folder: Path) -> None:
    """Make the folder, or bring it up to date; another process may do the same at once. Raises OSError."""
    for path in (folder, folder / _DISTRIBUTION):
        path.mkdir(mode=0o700, exist_ok=True)
    fresh = folder / f".{os.getpid()}"
    fresh.unlink(missing_ok=True)
    for name, target in _SHOWN.items():
        if not (folder / name).is_symlink() or (folder / name).resolve() != target:
            fresh.symlink_to(target)
            fresh.replace(folder / name)
    for name, text in _FILES.items():
        fresh.write_text(text, encoding="ascii")
        fresh.replace(folder / _DISTRIBUTION / name)
