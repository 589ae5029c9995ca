"""Requests and tokens per minute: one counter per tenant, kind and minute, from which routers lease blocks.

A counter is a subject of RATES_STREAM; a message with the header `Nats-Incr` moves it and the acknowledgement says where it
stands. A router asks for a block by adding it: of what it added it has what lies at or below the limit, and takes back the rest.
"""

from shared.contracts.subjects import ROOT, token

RATES_STREAM = "TENANTRY_RATES"
RATES_SUBJECTS = (f"{ROOT}.rate.*.*.*",)
REQUESTS = "requests"
TOKENS = "tokens"
KEPT_S = 300.0  # a minute's counters are of no use once it is over


def rate_subject(tenant_id: str, kind: str, minute: int) -> str:
    """`minute`: of the clock that routers share, since 1970."""
    return f"{ROOT}.rate.{token(tenant_id)}.{token(kind)}.{minute}"
