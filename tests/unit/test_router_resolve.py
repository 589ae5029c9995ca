"""Who gets what, as tables: keys, tenant marks, models, defaults, and what is never revealed."""

from statistics import median
from time import perf_counter_ns

import msgspec
import pytest

from benchmarks.tenancy_control.configuration import configuration, table_of
from benchmarks.tenancy_control.configuration import secret as secret_number
from services.router.models import list_models
from services.router.resolve import Route, resolve, secret_of
from services.router.routes import RouteTable
from shared.bus import Entry
from shared.contracts import state
from shared.contracts.adapters import encode
from shared.errors import MissingKey, TenantryError
from shared.policy.lifecycle import AdapterState
from tests.router_fakes import BASE, CS_KEY, GATEWAY_KEY, SALES_KEY, keys, mount, pool_entry, sha256, tenants

OTHER_BASE = "demo@" + "cd" * 32
UNKNOWN = "adapter_not_found"


def table(*entries: object, routing: state.Routing | None = None, **tenant_options: object) -> RouteTable:
    found = RouteTable()
    revision = 0

    def put(key: str, value: bytes) -> None:
        nonlocal revision
        revision += 1
        found.apply(key, Entry(value, revision))

    for secret, key in keys().items():
        put(state.KEY_PREFIX + sha256(secret), state.encode(key))
    for name, tenant in tenants("sales", "cs", **tenant_options).items():
        put(state.TENANT_PREFIX + name, state.encode(tenant))
    for entry in entries:
        put(state.POOL_PREFIX + entry.pool_id, encode(entry))  # type: ignore[attr-defined]
    if routing is not None:
        put(state.ROUTING_KEY, state.encode(routing))
    return found


def full() -> RouteTable:
    old, new = mount("tone", "sales"), mount("tone", "sales", version=2)
    return table(
        pool_entry(
            old,
            new,
            mount("mail", "sales", state=AdapterState.LOADING),
            mount("soon", "sales", state=AdapterState.ADMITTED),
            mount("gone", "sales", state=AdapterState.DRAINING),
            mount("help", "cs"),
            aliases={"sales": {"tone": new.adapter_id, "gone": "ad_sales_gone_1"}, "cs": {"help": "ad_cs_help_1"}},
        )
    )


def code_of(routes: RouteTable, secret: str, mark: str, model: str) -> str:
    with pytest.raises(TenantryError) as raised:
        resolve(routes, secret, mark, model)
    return raised.value.code


@pytest.mark.parametrize(
    ("secret", "mark", "model", "serves"),
    [
        (SALES_KEY, "", "tone", "tone@2"),
        (SALES_KEY, "sales", "tone", "tone@2"),
        (SALES_KEY, "", "tone@1", "tone@1"),
        (SALES_KEY, "", "tone@2", "tone@2"),
        (SALES_KEY, "", "demo", "demo"),
        (SALES_KEY, "", BASE, "demo"),
        (CS_KEY, "", "", "help@1"),
        (CS_KEY, "", "default", "help@1"),
        (GATEWAY_KEY, "cs", "help", "help@1"),
        (GATEWAY_KEY, " cs ", "", "help@1"),
    ],
)
def test_what_a_request_resolves_to(secret: str, mark: str, model: str, serves: str) -> None:
    assert resolve(full(), secret, mark, model).handle.public_model == serves


@pytest.mark.parametrize(
    ("secret", "mark", "model", "code"),
    [
        ("nobody", "", "tone", "invalid_api_key"),
        (SALES_KEY, "cs", "help", "tenant_not_allowed"),
        (GATEWAY_KEY, "finance", "x", "tenant_not_allowed"),
        (GATEWAY_KEY, "", "help", "tenant_required"),
        (SALES_KEY, "", "help", UNKNOWN),
        (SALES_KEY, "", "help@1", UNKNOWN),
        (SALES_KEY, "", "gone", UNKNOWN),
        (SALES_KEY, "", "gone@1", UNKNOWN),
        (SALES_KEY, "", "tone@3", UNKNOWN),
        (SALES_KEY, "", "tone@", UNKNOWN),
        (SALES_KEY, "", "TONE", UNKNOWN),
        (SALES_KEY, "", "ad_sales_tone_1", UNKNOWN),
        (SALES_KEY, "", OTHER_BASE, UNKNOWN),
        (SALES_KEY, "", "mail", "adapter_not_ready"),
        (SALES_KEY, "", "mail@1", "adapter_not_ready"),
        (SALES_KEY, "", "soon", "adapter_not_ready"),
        (SALES_KEY, "", "", "invalid_request"),
    ],
)
def test_what_a_request_is_refused_with(secret: str, mark: str, model: str, code: str) -> None:
    assert code_of(full(), secret, mark, model) == code


def test_the_marked_default_serves_where_there_are_several() -> None:
    routes = table(pool_entry(mount("tone", "sales"), mount("mail", "sales")), default_adapter="mail")
    assert resolve(routes, SALES_KEY, "", "").handle.public_model == "mail@1"


def test_a_default_that_is_not_mounted_is_not_replaced_by_another() -> None:
    routes = table(pool_entry(mount("tone", "sales")), default_adapter="mail")
    assert code_of(routes, SALES_KEY, "", "") == UNKNOWN


def test_a_default_that_is_the_only_one_and_loading_says_so() -> None:
    assert code_of(table(pool_entry(mount("tone", "sales", state=AdapterState.LOADING))), SALES_KEY, "", "") == "adapter_not_ready"


def test_without_adapters_the_error_names_the_base() -> None:
    with pytest.raises(TenantryError, match="demo"):
        resolve(table(pool_entry()), SALES_KEY, "", "")


def test_the_base_is_refused_where_it_is_not_allowed_and_not_offered() -> None:
    routes = table(pool_entry(mount("tone", "sales")), base_allowed=False)
    assert code_of(routes, SALES_KEY, "", "demo") == "base_not_allowed"
    assert b'"demo"' not in list_models(routes, SALES_KEY, "").replace(b'"parent":"demo"', b"")


def test_base_traffic_may_go_to_every_worker_of_the_pool_and_adapter_traffic_to_its_own() -> None:
    routes = table(pool_entry(mount("tone", "sales", worker_id="w1"), workers=("w0", "w1", "w2")))
    assert workers_of(resolve(routes, SALES_KEY, "", "demo")) == {"w0", "w1", "w2"}
    assert workers_of(resolve(routes, SALES_KEY, "", "tone")) == {"w1"}


def workers_of(route: Route) -> set[str]:
    return {worker.worker_id for worker in route.workers}


def test_two_revisions_of_a_base_under_one_label_must_be_told_apart_by_identity() -> None:
    routes = table(pool_entry(), pool_entry(pool_id="other", base=OTHER_BASE))
    assert code_of(routes, SALES_KEY, "", "demo") == "invalid_request"
    assert resolve(routes, SALES_KEY, "", OTHER_BASE).handle.base == OTHER_BASE


def test_a_name_that_was_an_adapters_never_falls_back_to_a_base_of_the_same_name() -> None:
    named_like_the_base = mount("demo", "sales")
    mounted = pool_entry(named_like_the_base)
    assert resolve(table(mounted), SALES_KEY, "", "demo").handle.public_model == "demo@1"
    unloaded = msgspec.structs.replace(pool_entry(), versions={"sales": {"demo": 1}})
    routes = table(unloaded)
    assert code_of(routes, SALES_KEY, "", "demo") == UNKNOWN
    assert resolve(routes, SALES_KEY, "", BASE).handle.adapter_id == "", "the identity is never ambiguous"
    assert resolve(routes, CS_KEY, "", "demo").handle.adapter_id == "", "another tenant's name means nothing"


def test_a_mount_of_an_earlier_tenant_of_the_same_name_is_nobodys() -> None:
    left_over = msgspec.structs.replace(mount("tone", "sales"), tenant_id="t_sales_of_last_year")
    assert code_of(table(pool_entry(left_over)), SALES_KEY, "", "tone") == UNKNOWN
    assert code_of(table(pool_entry(left_over)), SALES_KEY, "", "tone@1") == UNKNOWN


def test_a_gateway_without_a_mark_gets_the_base_and_nothing_else_under_base_only() -> None:
    routing = state.Routing(default=state.RoutingDefault.BASE_ONLY)
    routes = table(pool_entry(mount("help", "cs")), routing=routing)
    handle = resolve(routes, GATEWAY_KEY, "", "").handle
    assert (handle.tenant_id, handle.adapter_id) == ("_gateway", "")
    assert resolve(routes, GATEWAY_KEY, "", "demo").handle.adapter_id == ""
    assert code_of(routes, GATEWAY_KEY, "", "help") == UNKNOWN


def test_a_restarted_worker_that_loads_again_is_not_ready_rather_than_unknown() -> None:
    loading = mount("tone", "sales", state=AdapterState.LOADING)
    routes = table(pool_entry(loading, aliases={"sales": {"tone": loading.adapter_id}}))
    assert code_of(routes, SALES_KEY, "", "tone") == "adapter_not_ready"


def test_a_tenant_that_was_deleted_is_refused_even_with_a_live_key() -> None:
    routes = full()
    routes.apply(state.TENANT_PREFIX + "sales", None)
    assert code_of(routes, SALES_KEY, "", "tone") == "tenant_not_allowed"


def test_an_entry_that_cannot_be_read_takes_what_it_replaces_out_of_service() -> None:
    routes = full()
    routes.apply(state.KEY_PREFIX + sha256(SALES_KEY), Entry(b"{", 99))
    assert code_of(routes, SALES_KEY, "", "tone") == "invalid_api_key"
    routes.apply(state.POOL_PREFIX + "main", Entry(b'{"pool_id": 1}', 100))
    assert routes.pools == {}


def test_the_heartbeat_does_not_count_as_a_change_of_routes() -> None:
    routes = full()
    before = routes.version
    routes.apply(state.HEARTBEAT_KEY, Entry(b"1", 100))
    assert routes.version == before


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "secret"),
    [("Bearer a", "", "a"), ("bearer  a ", "", "a"), ("", "b", "b"), ("Bearer a", "b", "a"), ("Basic x", "b", "b")],
)
def test_where_the_secret_is_read_from(authorization: str, x_api_key: str, secret: str) -> None:
    assert secret_of(authorization, x_api_key) == secret


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer ", "Basic abc"])
def test_no_secret_is_an_error(authorization: str) -> None:
    with pytest.raises(MissingKey):
        secret_of(authorization, "")


def test_a_gateways_key_speaks_for_those_it_names_now_and_no_longer_for_those_it_named() -> None:
    routes = full()
    names = tuple(f"team{number}" for number in range(2000))
    for revision, tenants_of_key in enumerate((("sales", *names), ("cs", *names)), 1000):
        key = state.ApiKey(key_id="k3", label="", tenants=tenants_of_key, gateway=True)
        routes.apply(state.KEY_PREFIX + sha256(GATEWAY_KEY), Entry(state.encode(key), revision))
    assert resolve(routes, GATEWAY_KEY, "cs", "help").handle.public_model == "help@1"
    assert code_of(routes, GATEWAY_KEY, "sales", "tone") == "tenant_not_allowed"
    routes.apply(state.KEY_PREFIX + sha256(GATEWAY_KEY), None)
    assert code_of(routes, GATEWAY_KEY, "cs", "help") == "invalid_api_key"


def test_a_lookup_takes_as_long_among_ten_thousand_adapters_as_among_ten() -> None:
    """By how long the same key's look-ups take in both tables, turn by turn."""
    large = table_of(configuration(4))
    small = table_of(configuration(4, tenants=1))
    taken: dict[int, list[int]] = {id(large): [], id(small): []}
    for _ in range(2000):
        for table in (large, small):
            started_ns = perf_counter_ns()
            resolve(table, secret_number(0), "", "adapter3")
            taken[id(table)].append(perf_counter_ns() - started_ns)
    assert median(taken[id(large)]) < 3 * median(taken[id(small)])
