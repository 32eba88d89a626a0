"""Owns which nodes a request names: `all`, or addresses of nodes that are there."""

from __future__ import annotations

from collections.abc import Sequence

from sparkd.errors import BadRequest

ALL = "all"


def chosen_nodes(nodes: Sequence[str] | str, there: Sequence[str]) -> list[str]:
    """Each named node once, in the order of the request. nodes: addresses, one address, or ALL. there: the nodes that answer.

    Raises BadRequest for a node that is not there.
    """
    if nodes == ALL:
        return list(there)
    chosen = [nodes] if isinstance(nodes, str) else list(dict.fromkeys(nodes))
    if unknown := [node for node in chosen if node not in there]:
        raise BadRequest(f"{', '.join(unknown)[:200]} is not in this cluster, whose nodes are {', '.join(there)}: see `sparkd nodes`.")
    return chosen
