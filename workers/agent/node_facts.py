"""Answers an agent's questions about its node: network, preparation, Python environments and the files of models. It changes nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from workers.agent.other_engines import foreign
from workers.files.manifest import ModelManifest, lacking, manifest_of
from workers.host import inspection, meminfo, network
from workers.host.identity import identity
from workers.host.link_peers import knock
from workers.host.runtime import probe
from workers.rank.status import living_workers


class NodeFacts:
    """A base of workers.agent.actor.Agent.

    node_id: the node's address.
    run_dir: of its ranks.
    proc: the folder that stands for /proc.
    """

    def __init__(self, node_id: str, run_dir: str, proc: Path) -> None:
        self.node_id = node_id
        self.run_dir = run_dir
        self._proc = proc

    def fabric(self) -> dict[str, Any]:
        """This node's network now: see workers.host.network.sample, and `answers`, what workers.host.link_peers.knock says.

        Takes as long as `ip` does, at most some seconds.
        """
        answers = knock()
        return network.sample() | {"answers": answers}

    def host(self, runtime: str | None) -> dict[str, Any]:
        """How this node was prepared: see workers.host.inspection.sample. Takes at most two of its time-outs."""
        return inspection.sample(runtime=runtime, workers=living_workers(self.run_dir))

    def foreign(self, device: bool) -> list[dict[str, Any]]:
        """Engines that sparkd did not start: see workers.agent.other_engines."""
        return foreign(self.run_dir, ask_device=device)

    def free_port(self) -> int:
        """One of this node's address that nothing listens on now."""
        # Ray and vLLM take theirs at random too: a collision ends the engine, which is retried.
        with socket.socket() as probe:
            probe.bind((self.node_id, 0))
            return int(probe.getsockname()[1])

    def runtime(self, interpreter: str) -> dict[str, Any]:
        """{"platform", "vllm", "entrypoint", "packages"} of a Python interpreter of this node, and its "mem_total_bytes". Raises
        RankError."""
        return {**probe(interpreter).to_dict(), "mem_total_bytes": meminfo.mem_total_bytes(self._proc)}

    def identity(self, interpreter: str, model: str, revision: str | None, environ: dict[str, str]) -> dict[str, Any]:
        """The identity of what this node would serve the model with: see workers.host.identity. environ: the model's own, over this node's.
        Raises RankError."""
        return identity(interpreter, model, revision, {**os.environ, **environ})

    def staged(self, model: str, revision: str | None, environ: dict[str, str]) -> dict[str, Any] | None:
        """This node's files of a model: workers.files.manifest.ModelManifest, None where it has none. Raises RankError."""
        manifest = manifest_of(model, revision, {**os.environ, **environ})
        return manifest.to_dict() if manifest else None

    def lacking(self, manifest: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
        """See workers.files.manifest.lacking. Raises RankError."""
        return lacking(ModelManifest.from_dict(manifest), {**os.environ, **environ})
