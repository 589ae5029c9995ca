"""/v1/models, answered from the route table: only what the key may use."""

from typing import Any

import msgspec

from services.router.resolve import ModelInfo, visible_models
from services.router.routes import RouteTable
from shared.errors import AdapterNotFound

_encode = msgspec.json.Encoder().encode


def list_models(table: RouteTable, secret: str, mark: str) -> bytes:
    """OpenAI's list.

    :raises TenantryError: as resolve's authenticate and speaks_for.
    """
    return _encode({"object": "list", "data": [_shown(info) for info in visible_models(table, secret, mark)]})


def show_model(table: RouteTable, secret: str, mark: str, model: str) -> bytes:
    """One of the list, by its name, its `alias@version` or its base's identity.

    :raises AdapterNotFound: not one that the key may use now.
    """
    for info in visible_models(table, secret, mark):
        if model in {info.model, info.handle.public_model} or (not info.handle.adapter_id and model == info.handle.base):
            return _encode(_shown(info))
    raise AdapterNotFound(f"the model `{model[:128]}` does not exist, or this key may not use it", param="model")


def _shown(info: ModelInfo) -> dict[str, Any]:
    handle = info.handle
    tenantry: dict[str, Any] = {"base": handle.base, "pool": handle.pool_id}
    if handle.adapter_id:
        tenantry |= {"version": handle.version, "digest": handle.digest, "serves": handle.public_model}
    return {
        "id": info.model,
        "object": "model",
        "created": 0,
        "owned_by": handle.tenant if handle.adapter_id else "tenantry",
        "parent": handle.base.rsplit("@", 1)[0] if handle.adapter_id else None,
        "tenantry": tenantry,
    }
