"""What holds for every test: Ctrl-C is what it is in a terminal.

A shell that starts the tests in the background has it ignored (POSIX sh, 2.11), and what they start would inherit that.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
