"""The subscriber's timers against a plain model of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex.subscribe.watch import Deadlines

pytestmark = pytest.mark.unit

owners = st.sampled_from("abc")
times = st.integers(0, 20).map(float)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("set"), owners, st.one_of(times, st.none())),
        st.tuples(st.just("forget"), owners, st.none()),
        st.tuples(st.just("due"), st.none(), times),
    ),
    max_size=40,
)


@given(actions=actions)
def test_each_owner_is_called_at_its_earliest_deadline_once(
    actions: list[tuple[str, str | None, float | None]],
) -> None:
    deadlines: Deadlines[str | None] = Deadlines()
    earliest: dict[str | None, float] = {}
    now = 0.0
    for kind, owner, when in actions:
        if kind == "set":
            deadlines.set(owner, when)
            if when is not None:
                earliest[owner] = min(when, earliest.get(owner, when))
        elif kind == "forget":
            deadlines.forget(owner)
            earliest.pop(owner, None)
        else:
            assert when is not None
            now = max(now, when)
            called = deadlines.due(now)
            assert len(called) == len(set(called))
            assert set(called) == {o for o, t in earliest.items() if t <= now}
            earliest = {o: t for o, t in earliest.items() if t > now}
        if earliest:
            assert deadlines.nearest is not None
            assert deadlines.nearest <= min(earliest.values())


def test_putting_off_costs_no_room() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for when in range(5, 10_000):
        deadlines.set("a", float(when))
    assert deadlines.due(5.0) == ["a"]
    assert deadlines.nearest is None
