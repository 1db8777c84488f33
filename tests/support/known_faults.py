"""Mark of tests whose promise does not hold yet. `grep -rn "known_fault(" tests` lists them."""

from __future__ import annotations

import pytest


def known_fault(
    name: str, raises: type[BaseException] | tuple[type[BaseException], ...] = AssertionError
) -> pytest.MarkDecorator:
    """Return a mark that expects a test to fail until the fault is mended.

    name: area and short name of the fault, such as "core/zero_groups". A test that passes is
    reported as failed: remove the mark when the fault is mended. An exception of another type than
    `raises` fails, too, so that a broken test is not taken for its fault.
    """
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"known fault: {name}")
