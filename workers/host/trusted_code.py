"""Writes and reads the value that tells an engine which commits' code it may run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# JSON: {"commits": {"owner/name": ["commit", ..]}, "others": ["commit", ..]}; see Commits.
VARIABLE = "SPARKD_TRUSTED_CODE"
REFUSED = "is not trusted at any commit"


@dataclass(frozen=True, slots=True)
class Commits:
    """commits: by repository, the commits whose code may run, the usual one first. others: the trusted commits of any other repository."""

    commits: Mapping[str, Sequence[str]] = field(default_factory=dict)
    others: Sequence[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, repository: str, revision: str | None) -> str:
        """The commit at which a repository's code runs where vLLM requests it at `revision`. Raises RuntimeError where there is none."""
        commits = self.commits.get(repository, self.others)
        if not commits:
            trusted = ", ".join(sorted(self.commits))
            raise RuntimeError(
                f"Code of {repository} {REFUSED}: trust_remote_code is for {trusted} here. Read that code, then add --code-revision with "
                f"the commit of {repository} to extra_args."
            )
        return revision if revision is not None and revision in commits else commits[0]
