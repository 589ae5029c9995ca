"""What `tenantry up` was asked for, whether this machine can do it, and what each service is told."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from services.cli import checks
from services.cli.datafolder import DataFolder, Secrets
from services.cli.supervisor import ServiceSettings

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo"
DEMO_LABEL = "tenantry/qwen3-moe-demo@v1"


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    port: int
    data: Path
    model: str
    label: str  # what adapters name as this base: label or label@revision
    engine: str
    max_loras: int
    max_lora_rank: int
    dtype: str
    engine_args: dict[str, Any]
    config: Path | None
    nats_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def prepare(options: UpOptions) -> DataFolder:
    """Checks in the order in which they are cheap; the data folder is locked afterwards.

    :raises StartFailed: one line with what to do.
    """
    checks.check_packages(options.engine)
    checks.check_model(options.model)
    folder = DataFolder(options.data)
    folder.prepare()
    folder.lock()
    checks.check_port(options.port, "--port")
    if options.nats_port > 0:
        checks.check_port(options.nats_port, "--nats-port")
    checks.check_disk(options.data)
    checks.check_memory(options.engine, Path(options.model).expanduser())
    return folder


def service_settings(options: UpOptions, secrets: Secrets, folder: DataFolder) -> ServiceSettings:
    """What each service is told; NATS credentials are the supervisor's to add."""
    label = options.label.rsplit("/", 1)[-1].split("@", 1)[0]
    worker = {
        "TENANTRY_WORKER_MODEL": options.model,
        "TENANTRY_WORKER_LABEL": label,
        "TENANTRY_WORKER_ENGINE": options.engine,
        "TENANTRY_WORKER_DTYPE": options.dtype,
        "TENANTRY_WORKER_MAX_LORAS": str(options.max_loras),
        "TENANTRY_WORKER_MAX_LORA_RANK": str(options.max_lora_rank),
        "TENANTRY_WORKER_ENGINE_ARGS": json.dumps(options.engine_args),
        "TENANTRY_WORKER_WORKER_ID": "worker-1",
        "TENANTRY_WORKER_CACHE_DIR": str(folder.worker),
        "TENANTRY_WORKER_CLUSTER_SECRET": secrets.cluster,
    }
    return ServiceSettings(
        router={
            "TENANTRY_ROUTER_PORT": str(options.port),
            "TENANTRY_ROUTER_ADMIN_KEY_SHA256": hashlib.sha256(secrets.admin_key.encode()).hexdigest(),
        },
        registry={
            "TENANTRY_REGISTRY_WORK_DIR": str(folder.path / "registry"),
            "TENANTRY_REGISTRY_USAGE_DB": str(folder.path / "usage" / "usage.sqlite"),
        },
        worker=worker,
    )
