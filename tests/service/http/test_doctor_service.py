"""The doctor, asked of a running `kvindex serve`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvindex.tools.cli.arguments import trusting
from kvindex.tools.doctor import Diagnosis, Target, examine
from tests.live import until
from tests.service.http.scenes import Served, certificate_in, engine, register, serving

pytestmark = pytest.mark.service


def examined(served: Served) -> Diagnosis:
    return examine([Target(url=f"http://127.0.0.1:{served.port}")])


def ids(report: Diagnosis) -> list[str]:
    return [finding.id for finding in report.findings]


def test_a_service_tells_that_it_knows_nobody_or_whom_it_cannot_vouch_for() -> None:
    with serving() as served, engine() as first:
        report = examined(served)
        assert ids(report) == ["service-without-workers", "service-examined"]
        assert report.exit_code == 1

        assert register(served, first).status in (200, 201)
        healthy = until(lambda: examined(served), lambda report: not report.exit_code)
        assert ids(healthy) == ["service-examined", "all-well"]
        assert "kvindex serve" in healthy.findings[0].what

        first.close()
        broken = until(lambda: examined(served), lambda report: report.exit_code)
        assert ids(broken) == ["service-rank-not-live", "service-examined"]


def test_an_engine_that_a_service_never_found_is_reported() -> None:
    with serving("--engine", "http://127.0.0.1:1") as served:
        report = examined(served)
    assert ids(report) == ["service-rank-not-live", "service-examined"]
    assert report.exit_code == 1
    missing = report.findings[0]
    assert "http://127.0.0.1:1: " in missing.what
    assert "refuses the connection" in missing.what


def test_an_own_authority_is_trusted_by_its_file_and_tls_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    cert, key = certificate_in(tmp_path)
    with serving("--tls-cert", cert, "--tls-key", key) as served:
        target = Target(url=f"https://localhost:{served.port}")
        refused = examine([target])
        assert (ids(refused), refused.exit_code) == (["tls-failed"], 2)
        assert "not trusted" in refused.findings[0].what
        assert "--cacert" in refused.findings[0].remedy
        assert "service-examined" in ids(examine([target], tls=trusting(str(cert))))
