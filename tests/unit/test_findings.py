"""The table of findings: codes are unique and stable words, every row can be filled, fixes fit the engine."""

from __future__ import annotations

import re
import string

import pytest

from gateway import findings
from gateway.records import EngineKind, Severity


def test_codes_are_unique_words() -> None:
    codes = [kind.code for kind in findings.KINDS]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]+", code) for code in codes)


def test_every_row_of_the_module_is_in_the_table() -> None:
    rows = {value.code for value in vars(findings).values() if isinstance(value, findings.Kind)}
    assert rows == {kind.code for kind in findings.KINDS}


@pytest.mark.parametrize("kind", findings.KINDS, ids=lambda kind: kind.code)
def test_details_are_filled_in(kind: findings.Kind) -> None:
    details: dict[str, object] = {
        name: 3 if spec else f"<{name}>" for _, name, spec, _ in string.Formatter().parse(kind.message) if name
    }
    found = kind.found(EngineKind.VLLM, **details)
    assert (found.severity, found.code, found.fix) == (kind.severity, kind.code, kind.fix)
    assert all(str(value) in found.message for value in details.values())
    assert kind.found(EngineKind.SGLANG, **details).fix == (kind.sglang_fix or kind.fix)
    if details:
        with pytest.raises(KeyError):
            kind.found()


def test_severities() -> None:
    assert findings.EVENTS_CONNECT.found(endpoint="x").severity is Severity.ERROR
