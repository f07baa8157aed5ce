"""The settings of expert parallelism, which the environment changes."""

from __future__ import annotations

import pytest
from uccl import _core

NAMES = ("DEVICE", "NODE", "RESERVED_SMS", "TIMEOUT_SECS", "TOKENS_AT_ONCE")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(f"UCCL_EP_{name}", raising=False)


def read() -> tuple[object, ...]:
    found = _core.ep_settings()
    return found.device, found.node, found.reserved_sms, found.timeout, found.tokens_at_once


def test_the_environment_changes_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read() == (None, None, 3, 100.0, 2048)
    values = ("cuda:1", str(2**64 - 1), "16", "0.5", "4096")
    for name, value in zip(NAMES, values):
        monkeypatch.setenv(f"UCCL_EP_{name}", value)
    assert read() == ("cuda:1", 2**64 - 1, 16, 0.5, 4096)
    for name in NAMES:
        monkeypatch.setenv(f"UCCL_EP_{name}", "")
    assert read() == (None, None, 3, 100.0, 2048)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("DEVICE", "gpu", "cpu, cuda or cuda:N"),
        ("NODE", "-1", r"a number from 0 to 2\^64 - 1"),
        ("RESERVED_SMS", "few", "a number of multiprocessors"),
        ("TIMEOUT_SECS", "0", "a number of seconds, more than 0"),
        ("TOKENS_AT_ONCE", "many", "a number of tokens, more than 0"),
    ],
)
def test_an_error_names_the_variable_its_value_and_the_allowed_ones(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(f"UCCL_EP_{name}", value)
    with pytest.raises(ValueError, match=f"UCCL_EP_{name} is {allowed}, not '{value}'"):
        _core.ep_settings()
