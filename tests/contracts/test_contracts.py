"""What crosses the bus: subjects take only tokens, every message survives its own encoding, errors keep code and fields."""

import msgspec
import pytest

from shared import errors
from shared.contracts import adapters, admin, inference, permissions, rates, usage, workers
from shared.contracts.base import BaseDescription, EngineLimits, Module
from shared.contracts.errors import to_error, to_info
from shared.policy.lifecycle import AdapterState

BASE = BaseDescription(
    identity="demo@" + "a" * 64,
    label="demo",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    dtype="float32",
    modules=(Module(path="model.layers.0.self_attn.q_proj", in_features=8, out_features=8),),
)
LIMITS = EngineLimits(slots=4, max_rank=16, bytes_per_rank=100, endpoints=("/v1/chat/completions",))
HANDLE = inference.Handle(
    tenant_id="tn_1", tenant="sales", pool_id="main", base=BASE.identity, adapter_id="ad_1", alias="tone", version=3, digest="sha256:00"
)


@pytest.mark.parametrize("value", ["", "a.b", "a b", "*", ">", "ä", "a\n", "a/b", "$JS"])
@pytest.mark.parametrize(
    "subject",
    [
        adapters.load_subject,
        adapters.drain_subject,
        adapters.event_subject,
        adapters.onboard_subject,
        adapters.uploads_bucket,
        inference.answer_subject,
        inference.control_subject,
        inference.router_ping_subject,
        inference.worker_ping_subject,
        workers.report_subject,
        usage.worker_usage_subject,
        usage.router_usage_subject,
        permissions.tenant,
        lambda value: inference.infer_subject(value, "w"),
        lambda value: inference.infer_subject("a", value),
        lambda value: rates.rate_subject(value, rates.REQUESTS, 1),
        lambda value: rates.rate_subject("tn_1", value, 1),
    ],
)
def test_no_subject_is_built_from_what_is_not_one_token(subject: object, value: str) -> None:
    with pytest.raises(ValueError, match="not a subject token"):
        subject(value)  # type: ignore[operator]


def test_a_base_and_an_adapter_never_share_a_subject() -> None:
    of_base = msgspec.structs.replace(HANDLE, adapter_id="")
    assert of_base.subject_id == "base_" + "a" * 32
    assert inference.infer_subject(of_base.subject_id, "w") != inference.infer_subject(HANDLE.subject_id, "w")


def test_public_names_are_alias_at_version_or_the_bases_label() -> None:
    assert HANDLE.public_model == "tone@3"
    assert msgspec.structs.replace(HANDLE, adapter_id="").public_model == "demo"


def test_a_request_and_its_frames_survive_the_bus() -> None:
    request = inference.InferRequest(
        request_id="r", attempt=2, router_id="r1", handle=HANDLE, path="/v1/chat/completions", body=b'{"a":1}', stream=True, budget_s=5.0
    )
    assert inference.decode_request(inference.encode(request)) == request
    batch = inference.FrameBatch("w", "inc", [inference.Frame("r", 2, seq, kind, b"x") for seq, kind in enumerate(inference.FrameKind)])
    assert inference.decode_batch(inference.encode(batch)) == batch
    for control in (
        inference.Cancel(request_id="r", attempt=1, reason="client_gone"),
        inference.Ack(router_id="r1", positions=(("r", 1, 7),)),
        inference.Resend(router_id="r1", positions=(("r", 1, -1),)),
    ):
        assert inference.decode_control(inference.encode(control)) == control


def test_a_pool_and_what_is_said_about_it_survive_the_bus() -> None:
    mount = adapters.Mount(
        adapter_id="ad_1", tenant_id="tn_1", tenant="sales", name="tone", version=3, digest="sha256:00", worker_id="w0",
        state=AdapterState.READY, rank=8, rank_class=8, slot_bytes=800, true_bytes=700, drain=adapters.DrainOrder(deadline_s=3.0),
    )  # fmt: skip
    worker = adapters.PoolWorker(worker_id="w0", incarnation="i", limits=LIMITS)
    pool = adapters.PoolEntry(
        pool_id="main", base=BASE.identity, workers={"w0": worker}, mounts={"ad_1": mount}, aliases={"sales": {"tone": "ad_1"}}
    )
    assert adapters.decode_pool(adapters.encode(pool)) == pool
    command = adapters.LoadAdapter(pool_id="main", adapter_id="ad_1", generation=7)
    assert adapters.decode_command(adapters.encode(command)) == command
    failed = adapters.AdapterFailed(
        pool_id="main", adapter_id="ad_1", worker_id="w0", incarnation="i", generation=7,
        error=to_info(errors.LoadFailed("it does nothing", reason="no_effect")),
    )  # fmt: skip
    assert adapters.decode_acknowledgement(adapters.encode(failed)) == failed
    hello = workers.WorkerHello(worker_id="w0", incarnation="i", pool_id="main", base=BASE, limits=LIMITS, engine="scripted")
    assert workers.decode_hello(workers.encode(hello)) == hello


def test_an_entry_written_by_a_newer_version_is_still_read() -> None:
    raw = msgspec.json.decode(adapters.encode(adapters.PoolEntry(pool_id="main", base=BASE.identity)))
    assert adapters.decode_pool(msgspec.json.encode(raw | {"invented_later": 1})).pool_id == "main"


@pytest.mark.parametrize("operation", admin.AdminRequest.__args__)
def test_every_management_operation_has_a_tag_of_its_own(operation: type[msgspec.Struct]) -> None:
    tag = operation.__struct_config__.tag
    assert [other for other in admin.AdminRequest.__args__ if other.__struct_config__.tag == tag] == [operation]


def test_an_error_keeps_its_code_and_figures_across_the_bus() -> None:
    error = errors.QuotaExceeded("too much", asked_bytes=3, held_bytes=2, limit_bytes=4)
    back = to_error(inference.decode_error(inference.encode(to_info(error))))
    assert type(back) is errors.QuotaExceeded
    assert (back.message, back.fields) == (error.message, error.fields)


def test_a_code_of_a_newer_peer_stays_readable() -> None:
    back = errors.from_code("invented_later", "something", {"a": 1})
    assert (back.code, back.fields["peer_code"], back.fields["a"]) == ("internal_error", "invented_later", 1)


def test_no_two_errors_share_a_code() -> None:
    def all_of(kind: type[errors.TenantryError]) -> list[type[errors.TenantryError]]:
        return [kind, *(deeper for below in kind.__subclasses__() for deeper in all_of(below))]

    codes = [kind.code for kind in all_of(errors.TenantryError) if kind is not errors.TenantryError]
    assert len(codes) == len(set(codes))
