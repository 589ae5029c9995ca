"""How the engine's scheduler knows whose a request is: by its cache salt, or by a mark where several tenants share one."""

from typing import Any

TENANT_MARK = "tenantry_tenant"  # in the sampling parameters' extra_args, which no client can set


def owner_of(request: Any) -> str | None:
    """Of one of vLLM's requests."""
    params = request.sampling_params
    extra = params.extra_args if params is not None else None
    return extra.get(TENANT_MARK, request.cache_salt) if extra else request.cache_salt
