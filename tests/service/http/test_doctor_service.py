"""The doctor, asked of a running `kvindex serve`."""

from __future__ import annotations

import pytest

from kvindex.tools.doctor import Report, Target, examine
from tests.live import until
from tests.service.http.served import Served, engine, register, serving

pytestmark = pytest.mark.service


def examined(served: Served) -> Report:
    return examine([Target(url=f"http://127.0.0.1:{served.port}")])


def ids(report: Report) -> list[str]:
    return [finding.id for finding in report.findings]


def test_a_service_tells_that_it_knows_nobody_or_whom_it_cannot_vouch_for() -> None:
    with serving() as served, engine() as first:
        report = examined(served)
        assert (ids(report), report.exit_code) == (["service-without-workers"], 1)

        assert register(served, first).status in (200, 201)
        healthy = until(lambda: examined(served), lambda report: not report.findings)
        assert healthy.exit_code == 0

        first.close()
        broken = until(lambda: examined(served), lambda report: report.findings)
        assert ids(broken) == ["service-rank-not-live"]
