"""The list of checks against liars is true: each stands where it says, and is missed if removed."""

from pathlib import Path

import pytest
from adversaries.checks import CHECKS, ROOT, fails_without

EACH = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)


@EACH
def test_each_check_stands_where_the_list_says_and_has_a_test(check):
    assert (ROOT / check.file).read_text().count(check.old) == 1
    file, _, name = check.test.partition("::")
    where = ROOT / "tests" / file
    assert where.exists()
    assert not name or f"def {name}(" in Path(where).read_text()


def test_no_two_checks_have_one_name():
    assert len({check.id for check in CHECKS}) == len(CHECKS)


@pytest.mark.long
@pytest.mark.timeout(900)
@EACH
def test_without_any_one_check_a_test_fails(check):
    assert fails_without(check)
