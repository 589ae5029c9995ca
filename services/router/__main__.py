"""`python -m services.router`: builds the real bus, table, planes and server, and stops them in order."""

import os

from ulid import ULID

from services.router.settings import RouterSettings
from services.router.stack import Router
from shared.bus import connect_with_patience, settings_from
from shared.runtime import Stop, run_service


async def main(settings: RouterSettings, stop: Stop) -> None:
    router_id = settings.router_id or "r_" + str(ULID())
    router = Router(settings, router_id)
    router.listen()
    bus = await connect_with_patience(settings_from(os.environ, "router"), settings.nats_patience_s)
    await router.run(bus, stop)


if __name__ == "__main__":
    run_service("router", RouterSettings, main)
