"""Objectives: headers before the tenant's settings, these before the defaults; malformed ones are named."""

from __future__ import annotations

import pytest
from baton_gateway.config import Settings
from baton_gateway.objectives import (
    PRIORITY_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
    Objectives,
    objectives_of,
)
from baton_gateway.tenants.tenant import MS_MAX, Permission, Tenant, tenant_of

from baton import config
from baton.errors import ConfigurationError, InvalidRequest
from baton.messages.placement import PRIORITY_NEW

DEFAULT = Objectives(ttft_s=1.0, tpot_s=0.1)
PLAIN = Tenant()


def test_without_a_word_the_defaults_hold_and_refuse_nothing() -> None:
    assert objectives_of({}, PLAIN, DEFAULT) == DEFAULT


def test_a_tenant_states_objectives_for_all_its_requests() -> None:
    tenant = Tenant(weight=4.0, ttft_ms=500.0, priority=2)
    expected = Objectives(ttft_s=0.5, tpot_s=0.1, admits_by_ttft=True, priority=2, weight=4.0)
    assert objectives_of({}, tenant, DEFAULT) == expected


def test_a_request_states_its_own() -> None:
    headers = {TTFT_HEADER: "250.5", TPOT_HEADER: "40", PRIORITY_HEADER: "3"}
    found = objectives_of(headers, Tenant(ttft_ms=500.0), DEFAULT)
    assert found == Objectives(ttft_s=0.2505, tpot_s=0.04, admits_by_ttft=True, admits_by_tpot=True, priority=3)


def test_a_request_claims_no_earlier_class_than_its_tenants() -> None:
    assert objectives_of({PRIORITY_HEADER: "1"}, Tenant(priority=4), DEFAULT).priority == 4
    assert objectives_of({PRIORITY_HEADER: "1"}, PLAIN, DEFAULT).priority == PRIORITY_NEW


def test_a_key_claims_an_earlier_class_by_permission() -> None:
    tenant = Tenant(priority=4, permissions=frozenset({Permission.SET_PRIORITY}))
    assert objectives_of({PRIORITY_HEADER: "2"}, tenant, DEFAULT).priority == 2
    assert objectives_of({}, tenant, DEFAULT).priority == 4


def test_defaults_refuse_only_where_they_are_told_to() -> None:
    assert not Settings().default_objectives().admits_by_ttft
    default = Settings(admit_by_objectives=True, ttft_ms=2000.0).default_objectives()
    assert objectives_of({}, PLAIN, default) == Objectives(
        ttft_s=2.0, tpot_s=0.1, admits_by_ttft=True, admits_by_tpot=True
    )


@pytest.mark.parametrize("header", [TTFT_HEADER, TPOT_HEADER, PRIORITY_HEADER])
@pytest.mark.parametrize(
    "text", ["", "0", "-1", "nan", "inf", "1e3", "1_0", " 5", "٣", "1,2", "soon", "9" * 400, "0.5"]
)
def test_what_is_malformed_is_named_with_its_range(header: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"`{header}` must be .* from 1 to (7|600000)") as caught:
        objectives_of({header: text}, PLAIN, DEFAULT)
    assert caught.value.param == header


@pytest.mark.parametrize("text", ["8", "1.5", "600000"])
def test_a_class_is_a_whole_number_below_eight(text: str) -> None:
    with pytest.raises(InvalidRequest, match="whole number from 1 to 7"):
        objectives_of({PRIORITY_HEADER: text}, PLAIN, DEFAULT)
    assert objectives_of({TTFT_HEADER: f"{MS_MAX:.0f}"}, PLAIN, DEFAULT).ttft_s == 600.0


def load(tenants: str) -> Settings:
    return config.load(Settings, service="gateway", argv=["--api-keys", "one,two", "--tenants", tenants], environ={})


def test_tenants_are_configured_by_the_digests_of_their_keys() -> None:
    name = tenant_of("one")
    assert load(f'{{"{name}": {{"weight": 2, "ttft_ms": 500}}}}').tenants == {name: Tenant(weight=2.0, ttft_ms=500.0)}


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        ('{"0123": {}}', "0123 has none of the API keys"),
        (f'{{"{tenant_of("one")}": {{"weight": 0}}}}', "weight"),
        (f'{{"{tenant_of("one")}": {{"priority": 0}}}}', "priority"),
        (f'{{"{tenant_of("one")}": {{"wait": 1}}}}', "wait"),
        ("[", "not JSON"),
    ],
)
def test_a_malformed_tenant_stops_the_start(tenants: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load(tenants)
