"""The admin plane's way to the registry: one request, one reply, typed errors."""

from typing import Any

from services.router.admin.actor import current_actor
from shared.bus import Bus, BusUnavailable, NoResponder, RequestTimeout
from shared.contracts.admin import ADMIN_SUBJECT, AdminRequest, OnBehalf, decode_reply, encode
from shared.contracts.errors import to_error
from shared.errors import InvalidRequest, RegistryUnavailable

_TIMEOUT_S = 10.0


class RegistryClient:
    """Any registry may answer. It is told who asks: the actor of this context."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def ask(self, request: AdminRequest, wait_s: float = 0.0) -> Any:
        """The reply's result; wait_s is how long the operation itself may take besides.

        :raises RegistryUnavailable: no registry answers.
        :raises InvalidRequest: a number that no message can carry.
        :raises TenantryError: what the registry refused.
        """
        if not self._bus.connected:
            raise RegistryUnavailable("the bus cannot be reached now", retry_after_s=1.0)
        try:
            actor = current_actor.get()
            asked = encode(OnBehalf(who=actor.who, address=actor.address, request=request))
        except OverflowError as error:
            raise InvalidRequest("a number of the request is larger than any that means something here") from error
        try:
            data = await self._bus.request(ADMIN_SUBJECT, asked, _TIMEOUT_S + wait_s)
        except NoResponder as error:
            raise RegistryUnavailable("no registry is running", retry_after_s=1.0) from error
        except (RequestTimeout, BusUnavailable) as error:
            raise RegistryUnavailable(
                f"the registry did not answer: {error.message}; the operation may have been done", retry_after_s=1.0
            ) from error
        reply = decode_reply(data)
        if reply.error is not None:
            raise to_error(reply.error)
        return reply.result
