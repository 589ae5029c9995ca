"""What a request was charged of its tenant's budget of tokens."""


class Charge:
    """Tokens that a request was charged, until it is settled."""

    __slots__ = ("limit", "minute", "tenant_id", "tokens")

    def __init__(self, tenant_id: str, limit: int, minute: int, tokens: int) -> None:
        self.tenant_id = tenant_id
        self.limit = limit
        self.minute = minute
        self.tokens = tokens
