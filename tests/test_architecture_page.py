"""docs/architecture.md: its links lead to the lines that they name, and its picture is that of the packages as they are."""

from __future__ import annotations

from tests.support.architecture_page import LINK, PAGE, PICTURE, picture, with_lines

AGAIN = "run `python -m tests.support.architecture_page`"


def test_each_link_leads_to_the_line_that_it_names() -> None:
    page = PAGE.read_text()

    assert len(LINK.findall(page)) > 30
    assert page == with_lines(page), AGAIN


def test_the_picture_shows_the_packages_as_they_are() -> None:
    assert PICTURE.read_text() == picture(), AGAIN
