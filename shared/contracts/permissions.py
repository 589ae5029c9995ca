"""What each NATS user may publish and subscribe: the least that its service needs, built from the conversations' subjects."""

import msgspec

from shared.contracts import adapters, admin, audit, canary, rates, state, tenancy, workers
from shared.contracts.subjects import ROOT, token


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """`publish_denied` wins over `publish`."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    publish_denied: tuple[str, ...] = ()


class Lent(msgspec.Struct, frozen=True, kw_only=True):
    """What another NATS account is lent of ours: `services` it may publish or send requests to, `streams` it may hear."""

    services: tuple[str, ...]
    streams: tuple[str, ...]


JETSTREAM_API = "$JS.API."
# tenants' clients say jetstream(domain="tenantry")
TENANT_JETSTREAM_DOMAIN = "tenantry"
TENANT_JETSTREAM_API = f"$JS.{TENANT_JETSTREAM_DOMAIN}.API."


def _inbox(name: str) -> str:
    return f"_INBOX_{name}.>"


def _read_bucket(bucket: str) -> tuple[str, ...]:
    stream = f"KV_{bucket}"
    return (
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.INFO.{stream}.>",
        f"$JS.API.CONSUMER.DELETE.{stream}.>",
        f"$JS.FC.{stream}.>",
    )


def _read_keys(bucket: str, keys: str) -> tuple[str, ...]:
    """Get and watch these keys alone: the key, or the watch's filter, stands in the subject that asks for it."""
    stream, subject = f"KV_{bucket}", f"$KV.{bucket}.{keys}"
    return (
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.{subject}",
        f"$JS.API.CONSUMER.CREATE.{stream}.*.{subject}",
        f"$JS.API.CONSUMER.INFO.{stream}.>",
        f"$JS.FC.{stream}.>",
    )


def _read_objects(bucket: str) -> tuple[str, ...]:
    stream = f"OBJ_{bucket}"
    return (
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}.>",
        f"$JS.API.CONSUMER.INFO.{stream}.>",
        f"$JS.API.CONSUMER.DELETE.{stream}.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.>",
        f"$JS.ACK.{stream}.>",
        f"$JS.FC.{stream}.>",
    )


def _write_objects(bucket: str) -> tuple[str, ...]:
    """Chunks and metadata; a purge is what overwriting an own object does to its old chunks."""
    return (*_read_objects(bucket), f"$O.{bucket}.>", f"$JS.API.STREAM.PURGE.OBJ_{bucket}")


ROUTER = Permissions(
    publish=(
        f"{ROOT}.infer.>",
        f"{ROOT}.control.>",
        f"{ROOT}.worker.ping.>",
        f"{ROOT}.usage.router.>",
        f"{ROOT}.canary.>",
        *rates.RATES_SUBJECTS,
        admin.ADMIN_SUBJECT,
        *_read_bucket(state.STATE_BUCKET),
        *_write_objects(adapters.STAGING_BUCKET),
    ),
    subscribe=(
        _inbox("router"),
        f"{ROOT}.answer.>",
        f"{ROOT}.router.ping.>",
        workers.REPORTS_SUBJECT,
    ),
)

WORKER = Permissions(
    publish=(
        f"{ROOT}.answer.>",
        f"{ROOT}.router.ping.>",
        f"{ROOT}.worker.vram.>",
        workers.HELLO_SUBJECT,
        f"{ROOT}.usage.worker.>",
        *(subject.replace("*", ">") for subject in adapters.ACKS_SUBJECTS),
        *_read_keys(state.STATE_BUCKET, state.POOL_PREFIX + "*"),  # not tenants, not keys' hashes
        *_read_keys(state.STATE_BUCKET, tenancy.SHARES_PREFIX + ">"),
        *_read_objects(adapters.ARTIFACTS_BUCKET),
        f"$JS.API.STREAM.INFO.{adapters.COMMANDS_STREAM}",
        f"$JS.API.CONSUMER.CREATE.{adapters.COMMANDS_STREAM}.>",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{adapters.COMMANDS_STREAM}.>",
        f"$JS.API.CONSUMER.INFO.{adapters.COMMANDS_STREAM}.>",
        f"$JS.API.CONSUMER.MSG.NEXT.{adapters.COMMANDS_STREAM}.>",
        f"$JS.ACK.{adapters.COMMANDS_STREAM}.>",
    ),
    subscribe=(
        _inbox("worker"),
        f"{ROOT}.infer.>",
        f"{ROOT}.control.>",
        f"{ROOT}.worker.ping.>",
    ),
)

REGISTRY = Permissions(
    publish=(
        "$JS.API.>",
        "$JS.ACK.>",
        "$JS.FC.>",
        "$KV.>",
        "$O.>",
        f"{ROOT}.adapter.>",
        f"{ROOT}.audit.>",
        f"{ROOT}.usage.registry.>",
        "_INBOX_router.>",
        "_INBOX_worker.>",
    ),
    publish_denied=tuple(f"$JS.API.STREAM.{verb}.{audit.AUDIT_STREAM}" for verb in ("DELETE", "PURGE", "MSG.DELETE")),
    subscribe=(
        _inbox("registry"),
        admin.ADMIN_SUBJECT,
        workers.HELLO_SUBJECT,
        workers.REPORTS_SUBJECT,
        canary.COUNTS_SUBJECTS,
        f"{ROOT}.usage.>",
    ),
)

# who starts the server: sees tenants come and go, and workers report
SUPERVISOR = Permissions(
    publish=_read_bucket(state.STATE_BUCKET),
    subscribe=(_inbox("supervisor"), workers.REPORTS_SUBJECT),
)


def tenant_lent(tenant_id: str) -> Lent:
    """Its own onboarding subject, writing to its own upload bucket (reading and purging what it wrote), and its own outcomes.

    No consumers and no direct reads: those would let it choose where the server delivers bytes of its choice.
    """
    bucket = adapters.uploads_bucket(token(tenant_id))
    return Lent(
        services=(
            adapters.onboard_subject(tenant_id),
            f"$O.{bucket}.>",
            f"{JETSTREAM_API}STREAM.INFO.OBJ_{bucket}",
            f"{JETSTREAM_API}STREAM.MSG.GET.OBJ_{bucket}",
            f"{JETSTREAM_API}STREAM.PURGE.OBJ_{bucket}",
        ),
        streams=(adapters.event_subject(tenant_id),),
    )


def tenant(tenant_id: str) -> Permissions:
    """Inside its own account, in that account's names: what is lent to it, and its own inbox (`_INBOX_<tenant_id>`)."""
    lent = tenant_lent(tenant_id)
    local = tuple(subject.replace(JETSTREAM_API, TENANT_JETSTREAM_API, 1) for subject in lent.services)
    return Permissions(publish=local, subscribe=(_inbox(tenant_id), *lent.streams))
