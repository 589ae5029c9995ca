"""Which version a request resolves to while one is on trial, and what the router counts of both."""

import msgspec
import pytest

from services.router.exchange import Exchange
from services.router.models import list_models
from services.router.resolve import resolve
from services.router.routes import RouteTable
from services.router.split import session_of
from shared.contracts.adapters import Canary, CanaryBy, Mount, PoolEntry
from shared.errors import TenantryError
from shared.policy.lifecycle import AdapterState
from tests.router_fakes import CS_KEY, SALES_KEY, mount, pool_entry
from tests.unit.test_router_resolve import table

STABLE, TRIAL = mount("tone", "sales"), msgspec.structs.replace(mount("tone", "sales", version=2), on_trial=True)


def entry(canary: Canary | None = None, stable: Mount = STABLE, trial: Mount = TRIAL) -> PoolEntry:
    made = pool_entry(stable, trial, mount("help", "cs"), aliases={"sales": {"tone": STABLE.adapter_id}, "cs": {"help": "ad_cs_help_1"}})
    canary = canary or Canary(adapter_id=TRIAL.adapter_id, share_ppm=500_000)
    return msgspec.structs.replace(made, canaries={"sales": {"tone": canary}})


def canary(share_ppm: int, by: CanaryBy = CanaryBy.REQUEST, **changes: object) -> Canary:
    return Canary(adapter_id=TRIAL.adapter_id, share_ppm=share_ppm, by=by, **changes)


def asked(request_id: str = "r1", body: bytes = b"{}", **headers: str) -> Exchange:
    exchange = Exchange(request_id, "/v1/chat/completions", 0.0)
    exchange.headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    exchange.body = body
    return exchange


def serves(routes: RouteTable, exchange: Exchange, model: str = "tone", key: str = SALES_KEY) -> str:
    return resolve(routes, key, "", model, exchange).handle.public_model


def test_a_request_is_split_and_every_attempt_of_it_goes_the_same_way() -> None:
    routes = table(entry())
    went = [serves(routes, asked(f"r{n}")) for n in range(200)]
    assert went == [serves(routes, asked(f"r{n}")) for n in range(200)]
    assert 70 < went.count("tone@2") < 130


@pytest.mark.parametrize("model", ["", "default"])
def test_the_tenants_default_is_split_too(model: str) -> None:
    assert serves(table(entry(canary(1_000_000))), asked(), model) == "tone@2"


def test_a_version_that_is_named_is_that_version() -> None:
    routes = table(entry(canary(1_000_000)))
    assert serves(routes, asked(), "tone@1") == "tone@1"
    assert serves(table(entry(canary(0))), asked(), "tone@2") == "tone@2"


def test_a_session_stays_with_its_version_over_requests_and_routers() -> None:
    first, second = table(entry(canary(300_000, CanaryBy.SESSION))), table(entry(canary(300_000, CanaryBy.SESSION)))
    for session in (f"s{n}" for n in range(100)):
        here = {serves(first, asked(f"r{n}", x_tenantry_session=session)) for n in range(5)}
        assert here == {serves(second, asked("other", b'{"user":"somebody"}', x_tenantry_session=session))}
        assert len(here) == 1


@pytest.mark.parametrize(
    ("body", "session"),
    [
        (b'{"user":"u1"}', "u1"),
        (b'{"metadata":{"user_id":"u2"}}', "u2"),
        (b'{"user":"u1","metadata":{"user_id":"u2"}}', "u1"),
        (b'{"metadata":{"other":1}}', ""),
        (b'{"user":5}', ""),
        (b'{"metadata":[1]}', ""),
        (b"[]", ""),
        (b"", ""),
    ],
)
def test_where_a_session_comes_from(body: bytes, session: str) -> None:
    assert session_of(asked(body=body)) == session
    assert session_of(asked(body=body, x_tenantry_session="h")) == "h"


def test_a_user_in_the_body_and_the_same_session_in_the_header_are_one() -> None:
    routes = table(entry(canary(500_000, CanaryBy.SESSION)))
    for name in (f"u{n}" for n in range(50)):
        body = msgspec.json.encode({"user": name})
        assert serves(routes, asked(body=body)) == serves(routes, asked("x", x_tenantry_session=name))


@pytest.mark.parametrize(
    ("header", "version"), [("1", "tone@2"), ("canary", "tone@2"), (" Canary ", "tone@2"), ("stable", "tone@1"), ("yes", "tone@1")]
)
def test_the_canary_header(header: str, version: str) -> None:
    assert serves(table(entry(canary(1_000_000, CanaryBy.HEADER))), asked(x_tenantry_canary=header)) == version


def test_by_header_a_request_without_it_is_the_stable_versions() -> None:
    assert serves(table(entry(canary(1_000_000, CanaryBy.HEADER))), asked()) == "tone@1"


@pytest.mark.parametrize("state", [AdapterState.LOADING, AdapterState.DRAINING])
def test_a_trial_that_is_not_ready_gets_nothing(state: AdapterState) -> None:
    routes = table(entry(canary(1_000_000), trial=msgspec.structs.replace(TRIAL, state=state)))
    assert serves(routes, asked(x_tenantry_canary="canary")) == "tone@1"


def test_a_trial_that_was_stopped_gets_nothing() -> None:
    assert serves(table(entry(canary(1_000_000, stopped="it fails"))), asked()) == "tone@1"


def test_a_stable_version_that_loads_again_is_waited_for_and_not_replaced_by_the_trial() -> None:
    routes = table(entry(canary(0), stable=msgspec.structs.replace(STABLE, state=AdapterState.LOADING)))
    with pytest.raises(TenantryError) as raised:
        serves(routes, asked())
    assert raised.value.code == "adapter_not_ready"


@pytest.mark.parametrize("state", [AdapterState.LOADING, AdapterState.READY])
def test_without_a_stable_version_the_alias_is_gone_and_only_the_version_itself_can_be_named(state: AdapterState) -> None:
    lost = msgspec.structs.replace(entry(canary(1_000_000), trial=msgspec.structs.replace(TRIAL, state=state)), aliases={})
    lost = msgspec.structs.replace(lost, mounts={TRIAL.adapter_id: lost.mounts[TRIAL.adapter_id]})
    with pytest.raises(TenantryError) as raised:
        serves(table(lost), asked())
    assert raised.value.code == "adapter_not_found"
    if state is AdapterState.READY:
        assert serves(table(lost), asked(), "tone@2") == "tone@2"


def test_another_tenants_requests_are_not_split() -> None:
    assert serves(table(entry(canary(1_000_000))), asked(), "help", CS_KEY) == "help@1"


def test_the_list_of_models_shows_the_stable_version() -> None:
    assert b'"serves":"tone@1"' in list_models(table(entry(canary(1_000_000))), SALES_KEY, "")
