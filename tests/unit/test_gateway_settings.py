"""A gateway that other machines can reach needs keys, or a setting that says that a proxy checks them."""

from __future__ import annotations

import pytest
from baton_gateway.config import Settings

from baton import config
from baton.errors import ConfigurationError


def load(*flags: str, **environ: str) -> Settings:
    return config.load(Settings, service="gateway", argv=flags, environ=environ)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "gateway.example"])
def test_a_host_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--api-keys, BATON_GATEWAY_API_KEYS.*--allow-open") as caught:
        load("--host", host)
    assert "\n" not in str(caught.value)
    assert load("--host", host, BATON_GATEWAY_API_KEYS="k").api_keys == ("k",)
    assert load("--host", host, "--allow-open").api_keys == ()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_needs_none(host: str) -> None:
    assert load("--host", host).api_keys == ()
