"""How many changes a minute one tenant may ask for."""

import pytest

from shared.errors import Overloaded
from shared.policy.pace import Pace


def test_each_tenant_has_its_own_minute_and_is_told_when_to_come_again() -> None:
    pace = Pace(2)
    for at_s in (100.0, 110.0):
        pace.take("sales", at_s)
    with pytest.raises(Overloaded) as refused:
        pace.take("sales", 130.0)
    assert (refused.value.fields["allowed"], refused.value.fields["retry_after_s"]) == (2, 30.0)
    pace.take("cs", 130.0)
    pace.take("sales", 160.0)


def test_what_was_refused_is_not_counted() -> None:
    pace = Pace(1)
    pace.take("sales", 100.0)
    for _ in range(5):
        with pytest.raises(Overloaded):
            pace.take("sales", 100.0)
    pace.take("sales", 160.0)
