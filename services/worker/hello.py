"""Makes this incarnation known to the registry, which answers with the generation it stands in."""

import asyncio

import msgspec
import structlog

from shared.bus import Bus, BusUnavailable, NoResponder, RequestTimeout
from shared.contracts import admin, workers
from shared.contracts.errors import to_error
from shared.contracts.workers import HELLO_SUBJECT, HelloAccepted, WorkerHello
from shared.errors import RegistryUnavailable, StartFailed

log = structlog.get_logger()

_TRANSIENT = frozenset({"bus_unavailable", "bus_timeout", "registry_unavailable", "overloaded"})


async def say_hello(bus: Bus, hello: WorkerHello, patience_s: float) -> int:
    """The accepted generation; asked again until a registry answers.

    :raises StartFailed: the registry refuses this worker (its reason is in the message).
    :raises RegistryUnavailable: none answered in patience_s.
    """
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + patience_s
    wait_s = 0.1
    while True:
        try:
            reply = admin.decode_reply(await bus.request(HELLO_SUBJECT, workers.encode(hello), timeout_s=5.0))
        except (NoResponder, RequestTimeout, BusUnavailable) as error:
            why = error.message
        except msgspec.MsgspecError as error:
            why = f"unreadable answer: {type(error).__name__}"
        else:
            if reply.error is None:
                return msgspec.convert(reply.result, HelloAccepted).generation
            if reply.error.code not in _TRANSIENT:
                refused = to_error(reply.error)
                raise StartFailed(f"the registry refuses this worker: {refused.message}", refusal=refused.code, **refused.fields)
            why = reply.error.message
        if loop.time() >= give_up_at_s:
            raise RegistryUnavailable(f"no registry accepted this worker in {patience_s:g} s: {why}", retry_after_s=1.0)
        log.info("hello.retry", reason=why)
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, 1.0)
