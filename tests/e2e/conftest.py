"""One whole stack with the real engine per test session; every test leaves the three demo adapters mounted."""

from collections.abc import Iterator

import pytest

from tests.e2e.ask import Asker
from tests.e2e.stack import DEMO, Stack, running

DEMO_ADAPTERS = {"lora_sales": "sales", "lora_cs": "cs", "lora_finance": "finance"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(Stack(tmp_path_factory.mktemp("stack"), max_loras=6)) as started:
        started.allow_label()
        for adapter, tenant in DEMO_ADAPTERS.items():
            started.add_tenant(tenant)
            started.admin.upload(tenant, adapter, DEMO / "adapters" / adapter)
        yield started


@pytest.fixture
def asker(stack: Stack) -> Asker:
    return Asker(stack)
