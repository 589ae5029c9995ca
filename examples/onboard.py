"""Onboards an adapter by event: `python examples/onboard.py NAME ARCHIVE`, with TENANTRY_NATS_URL, _USER and _PASSWORD set."""

import asyncio
import json
import os
import sys

import nats


async def onboard(name: str, archive: str) -> bool:
    me = os.environ["TENANTRY_NATS_USER"]
    client = await nats.connect(
        os.environ["TENANTRY_NATS_URL"], user=me, password=os.environ["TENANTRY_NATS_PASSWORD"], inbox_prefix=f"_INBOX_{me}"
    )
    stream = client.jetstream(domain="tenantry")
    outcomes = await client.subscribe(f"tenantry.v1.adapter.event.{me}")
    with open(archive, "rb") as file:  # noqa: ASYNC230  (nats reads it in a thread)
        await (await stream.object_store(f"uploads_{me}")).put(name, file)
    request = {"type": "onboard", "name": name, "object": name}
    await stream.publish(f"tenantry.v1.adapter.onboard.{me}", json.dumps(request).encode())
    while True:
        event = json.loads((await outcomes.next_msg(timeout=120)).data)
        if event["name"] == name:
            print(event["state"], (event.get("error") or {}).get("message", ""))
            if event["state"] in ("ready", "rejected", "failed"):
                await client.close()
                return event["state"] == "ready"


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(onboard(*sys.argv[1:])) else 1)
