"""Reads the logs of a node's ranks: what was written, NCCL's lines, and how an engine was started. It reads no other file."""

from __future__ import annotations

from pathlib import Path

from workers.rank import lifecycle


class RankLogs:
    """A base of workers.agent.actor.Agent. log_dir: the folder of this node's logs."""

    log_dir: str

    def read_log(self, path: str, cursor: str | None, max_bytes: int) -> dict[str, str]:
        """See workers.rank.log.read_log."""
        return lifecycle.read_log(path, cursor, max_bytes=max_bytes) if self._is_ours(path) else {"text": "", "cursor": cursor or ""}

    def nccl_lines(self, path: str) -> list[str]:
        """NCCL's own lines of one rank since it started."""
        return lifecycle.nccl_lines(path) if self._is_ours(path) else []

    def setting_lines(self, path: str) -> list[str]:
        """The lines in which one rank says how it was started."""
        return lifecycle.setting_lines(path) if self._is_ours(path) else []

    def _is_ours(self, path: str) -> bool:
        return Path(path).resolve().parent == Path(self.log_dir).resolve()
