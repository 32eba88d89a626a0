"""`python -m tests.support.patient_sparkd serve ..`: sparkd that gives no node up for as long as a test waits.

Ray takes up to a minute on busy cores until a node is in sight again: how long sparkd waits for it must not decide a test.
"""

from __future__ import annotations

import sys

from sparkd.__main__ import main
from sparkd.cluster import node_tracker
from sparkd.control import decision
from tests.support.lone_sparkd import alone
from tests.support.waiting import HUNG_S

if __name__ == "__main__":
    alone()
    node_tracker.NODE_GRACE_S = node_tracker.ACCEPTED_S = HUNG_S
    decision.ALONE_DARK_S = decision.DARK_S = HUNG_S
    sys.exit(main())
