"""The files in deploy/: whatever starts `kvindex serve` there is understood by `kvindex serve`."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from kvindex.service.settings import ServeSettings
from kvindex.tools.cli.arguments import settings_of
from kvindex.tools.cli.gateway import add_epp_options
from kvindex.tools.cli.serve import add_serve_options

pytestmark = pytest.mark.unit

DEPLOY = Path(__file__).parents[2] / "deploy"

if not DEPLOY.is_dir():
    pytest.skip("the wheel is tested without deploy/", allow_module_level=True)


def parsed(argv: list[str]) -> argparse.Namespace:
    """Return what the command makes of its arguments; argparse exits if it cannot."""
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    return parser.parse_args(argv)


def instructions(name: str) -> list[str]:
    """Return the instructions of a container file, each as one line."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Containerfile").read_text())
    return [line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{name} ")]


def unit() -> dict[str, list[str]]:
    """Return the settings of the systemd unit; one may come several times."""
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "kvindex.service").read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(key, []).append(value)
    return settings


def test_the_units_command_is_understood() -> None:
    (line,) = unit()["ExecStart"]
    program, command, *argv = shlex.split(line)
    assert (Path(program).name, command) == ("kvindex", "serve")
    arguments = parsed(argv)
    assert arguments.config == "/etc/kvindex/kvindex.toml"
    assert set(settings_of(arguments, ServeSettings)) == {"token_file", "state"}


def test_the_unit_runs_as_nobody_with_a_place_for_its_state() -> None:
    settings = unit()
    for key, value in (
        ("DynamicUser", "yes"),
        ("StateDirectory", "kvindex"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("CapabilityBoundingSet", ""),
    ):
        assert settings[key] == [value]
    assert int(settings["TimeoutStopSec"][0]) > 10  # longer than open requests get by default


def test_the_images_command_is_understood() -> None:
    assert json.loads(instructions("ENTRYPOINT")[-1]) == ["kvindex", "serve"]
    arguments = parsed(json.loads(instructions("CMD")[-1]))
    assert settings_of(arguments, ServeSettings)["host"] == "0.0.0.0"


def test_the_pickers_command_is_understood() -> None:
    text = (DEPLOY / "kubernetes" / "picker.yaml").read_text()
    assert "command: [kvindex, epp]" in text
    parser = argparse.ArgumentParser()
    add_epp_options(parser)
    arguments = parser.parse_args(re.findall(r"^ +- (--\S+)$", text, re.MULTILINE))
    assert (arguments.k8s_pool, arguments.drain, arguments.access_log) == ("vllm", 300.0, True)
    assert int(re.findall(r"terminationGracePeriodSeconds: (\d+)", text)[0]) > arguments.drain


def test_the_image_runs_as_nobody_and_is_built_from_named_files_only() -> None:
    assert instructions("USER") == ["65532:65532"]
    for line in instructions("COPY"):
        for name in line.split()[:-1]:
            if not name.startswith(("--from", "/opt")):
                assert (DEPLOY.parent / name).exists(), name
    assert all("/" not in line.split()[0] for line in instructions("FROM"))
