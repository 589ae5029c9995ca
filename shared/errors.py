"""Every error Tenantry raises or sends, each with a stable code and typed fields; HTTP statuses exist only in the router."""

from typing import Any, ClassVar, TypeVar

_E = TypeVar("_E", bound="type[TenantryError]")
_BY_CODE: dict[str, type["TenantryError"]] = {}


class TenantryError(Exception):
    """Root of Tenantry's errors.

    `code` is stable and crosses the bus; `message` says what was wrong, what was expected and what to do; `fields` are
    plain JSON values (limit_bytes, held_bytes, asked_bytes, retry_after_s, field, ...).
    """

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Any] = fields

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _BY_CODE[cls.code] = cls


class InternalError(TenantryError):
    """A broken promise of our own."""

    code = "internal_error"


class InvalidRequest(TenantryError):
    """The request itself is malformed (JSON, a value, a missing field)."""

    code = "invalid_request"


class FieldNotAllowed(TenantryError):
    """A body field that only the platform may set, or that is not known: `field`."""

    code = "field_not_allowed"


class EndpointNotSupported(TenantryError):
    """The pool's engine cannot serve this endpoint."""

    code = "endpoint_not_supported"


class BodyTooLarge(TenantryError):
    """asked_bytes, limit_bytes."""

    code = "body_too_large"


class MissingKey(TenantryError):
    code = "missing_api_key"


class InvalidKey(TenantryError):
    code = "invalid_api_key"


class TenantNotAllowed(TenantryError):
    """The key may not speak for the tenant that the header names."""

    code = "tenant_not_allowed"


class TenantRequired(TenantryError):
    """A gateway key's request without a tenant mark where routing.default is reject."""

    code = "tenant_required"


class AdapterNotFound(TenantryError):
    """No such model for this tenant (never says whether another tenant has it)."""

    code = "adapter_not_found"


class AdapterNotReady(TenantryError):
    """The adapter exists and is not serving yet, or no more: retry_after_s."""

    code = "adapter_not_ready"


class BaseNotAllowed(TenantryError):
    code = "base_not_allowed"


class WorkerUnavailable(TenantryError):
    """No worker that holds the adapter answers: retry_after_s."""

    code = "worker_unavailable"


class WorkerLost(TenantryError):
    """The worker died or fell silent after the answer had begun."""

    code = "worker_lost"


class StreamGap(TenantryError):
    """Frames of an answer were lost and could not be had again."""

    code = "stream_gap"


class RoutesStale(TenantryError):
    """The router's routes may be old and could not be refreshed: retry_after_s."""

    code = "routes_stale"


class Overloaded(TenantryError):
    """A bounded queue is full or a limit reached: asked, held, allowed, retry_after_s."""

    code = "overloaded"


class Draining(TenantryError):
    """The adapter is draining; the drain's deadline ended this request."""

    code = "adapter_draining"


class HandleMismatch(TenantryError):
    """The adapter that reached the engine is not the one the request resolved to."""

    code = "handle_mismatch"


class EmptyAnswer(TenantryError):
    """The engine ended a request without a body; it is never passed on as an answer."""

    code = "empty_answer"


class EngineError(TenantryError):
    code = "engine_error"


class DeadlineExceeded(TenantryError):
    code = "deadline_exceeded"


class Cancelled(TenantryError):
    """The client went away, or the router gave the attempt up."""

    code = "cancelled"


class AdapterRejected(TenantryError):
    """The artifact was refused before any engine saw it. `reason` is a stable sub-code (bad_shape, rank_too_big, ...)."""

    code = "adapter_rejected"


class QuotaExceeded(TenantryError):
    """asked_bytes, held_bytes, limit_bytes; scope says which limit (tenant, adapter)."""

    code = "quota_exceeded"


class KvQuotaExceeded(TenantryError):
    """asked_bytes, held_bytes, limit_bytes; retry_after_s where waiting can help."""

    code = "kv_quota_exceeded"


class ConcurrencyExceeded(TenantryError):
    """asked, held, limit: requests at once; retry_after_s."""

    code = "concurrency_exceeded"


class RequestRateExceeded(TenantryError):
    """asked, held, limit: requests in this minute; retry_after_s."""

    code = "request_rate_exceeded"


class TokenRateExceeded(TenantryError):
    """asked, held, limit: tokens in this minute; retry_after_s."""

    code = "token_rate_exceeded"


class QueueFull(TenantryError):
    """The tenant's own queue on a worker is full: asked, held, limit, retry_after_s."""

    code = "queue_full"


class QueueTimeout(TenantryError):
    """It waited in its tenant's queue until the deadline: waited_ms, what it waited for (asked, held, limit), retry_after_s."""

    code = "queue_timeout"


class HostCacheExceeded(TenantryError):
    """asked_bytes, held_bytes, limit_bytes."""

    code = "host_cache_exceeded"


class ArtifactQuotaExceeded(TenantryError):
    """Stored files: asked_bytes, held_bytes, limit_bytes."""

    code = "artifact_quota_exceeded"


class ScopeMissing(TenantryError):
    """The key is good and may not do this: needed, held."""

    code = "scope_missing"


class NoFreeSlot(TenantryError):
    """asked_slots, held_slots, limit_slots."""

    code = "no_free_slot"


class BaseMismatch(TenantryError):
    """expected (the pool's identity), got, and where `got` comes from."""

    code = "base_mismatch"


class BaseUnknown(TenantryError):
    """The label is in no alias table, or names several identities: label, candidates, command."""

    code = "base_unknown"


class IncompatiblePair(TenantryError):
    """The matrix knows no entry (or a refusal) for this adapter and base."""

    code = "incompatible_pair"


class LoadFailed(TenantryError):
    """The engine refused the adapter, or it did nothing: `reason`."""

    code = "load_failed"


class NotFound(TenantryError):
    code = "not_found"


class Conflict(TenantryError):
    """Somebody else changed it, or the operation is illegal in the present state."""

    code = "conflict"


class Unsupported(TenantryError):
    """A mode or feature that this version refuses by name."""

    code = "unsupported"


class NotPermitted(TenantryError):
    code = "not_permitted"


class RegistryUnavailable(TenantryError):
    """No registry answered: retry_after_s."""

    code = "registry_unavailable"


class ConfigInvalid(TenantryError):
    """A configuration file or setting: `where`, `expected`, `got`."""

    code = "config_invalid"


class StartFailed(TenantryError):
    """A process could not start (taken port, memory, disk, a missing package): one line with what to do."""

    code = "start_failed"


def from_code(code: str, message: str, fields: dict[str, Any]) -> TenantryError:
    """The error a peer sent; an unknown code (a newer peer's) becomes InternalError that keeps the code in its fields."""
    found = _BY_CODE.get(code)
    if found is None:
        return InternalError(message, peer_code=code, **fields)
    return found(message, **fields)
