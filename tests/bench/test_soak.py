"""What the soak takes for a leak."""

from __future__ import annotations

import pytest

from tests.bench import soak


@pytest.mark.parametrize(
    ("sizes", "is_leak"),
    [((230, 231, 237, 237.4), False), ((230, 237, 237.1, 237.2), False), ((230, 235, 240, 245), True), ((230, 236, 231, 237), True)],
)
def test_a_leak_grows_in_most_rounds(sizes: tuple[float, ...], is_leak: bool) -> None:
    """MiB."""
    assert (soak.growth(sizes) * 1024 > soak.MEMORY_BAR_KIB) is is_leak
