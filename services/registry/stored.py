"""What each tenant's stored adapter files take, against its artifact quota: reserved in one compare-and-set before a file is stored."""

from services.registry.store import Store
from shared.bus import Entry
from shared.contracts import state
from shared.contracts.state import AdapterRecord, StoredFiles
from shared.errors import ArtifactQuotaExceeded
from shared.policy.lifecycle import AdapterState


class StoredLedger:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def held_bytes(self, tenant_id: str) -> int:
        found = await self._store.catalog.get(state.STORED_PREFIX + tenant_id)
        return sum(state.decode_stored(found.value).files.values()) if found is not None else 0

    async def reserve(self, record: AdapterRecord, size_bytes: int) -> None:
        """:raises ArtifactQuotaExceeded: its tenant's other files leave no room for it. :raises NotFound: the tenant is gone."""

        async def with_it(entry: Entry | None) -> bytes:
            limit = (await self._store.tenant(record.tenant)).limits.artifact_bytes  # read after the entry: see fence.py
            files = dict(state.decode_stored(entry.value).files) if entry is not None else {}
            files.pop(record.adapter_id, None)
            held = sum(files.values())
            if limit is not None and held + size_bytes > limit:
                raise ArtifactQuotaExceeded(
                    f"{record.name} takes {size_bytes} bytes of stored files; tenant {record.tenant} holds {held} and is allowed {limit};"
                    " remove versions that are not mounted",
                    asked_bytes=size_bytes,
                    held_bytes=held,
                    limit_bytes=limit,
                )
            return state.encode(StoredFiles(files={**files, record.adapter_id: size_bytes}))

        await self._store.change(self._store.catalog, state.STORED_PREFIX + record.tenant_id, with_it)

    async def release(self, tenant_id: str, adapter_id: str) -> None:
        async def without_it(entry: Entry | None) -> bytes | None:
            files = state.decode_stored(entry.value).files if entry is not None else {}
            if adapter_id not in files:
                return None
            return state.encode(StoredFiles(files={known: size for known, size in files.items() if known != adapter_id}))

        await self._store.change(self._store.catalog, state.STORED_PREFIX + tenant_id, without_it)

    async def forget(self, tenant_id: str) -> None:
        await self._store.catalog.delete(state.STORED_PREFIX + tenant_id)

    async def repair(self) -> None:
        """Entries without files go; files without an entry get one."""
        by_tenant: dict[str, dict[str, int]] = {}
        for record in self._store.records():
            if record.artifact:
                by_tenant.setdefault(record.tenant_id, {})[record.adapter_id] = record.artifact_bytes
        known = {key.removeprefix(state.STORED_PREFIX) for key in await self._store.catalog.keys(state.STORED_PREFIX)}
        for tenant_id in sorted(known | by_tenant.keys()):
            await self._repair(tenant_id, by_tenant.get(tenant_id, {}))

    async def _repair(self, tenant_id: str, files: dict[str, int]) -> None:
        async def right(entry: Entry | None) -> bytes | None:
            before = state.decode_stored(entry.value).files if entry is not None else {}
            kept = {
                adapter_id: size for adapter_id, size in before.items() if adapter_id in files or await self._may_have_files(adapter_id)
            }
            after = {**files, **kept}
            return state.encode(StoredFiles(files=after)) if after != before else None

        await self._store.change(self._store.catalog, state.STORED_PREFIX + tenant_id, right)

    async def _may_have_files(self, adapter_id: str) -> bool:
        record = await self._store.record(adapter_id)
        return record is not None and (bool(record.artifact) or record.state is not AdapterState.REJECTED)
