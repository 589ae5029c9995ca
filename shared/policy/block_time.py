"""How much KV cache was held for how long, exactly: integers of blocks and microseconds, summed at every change. Pure."""


class BlockTime:
    """One holder's. Times are of one clock that does not go back."""

    __slots__ = ("_block_us", "_since_us", "blocks")

    def __init__(self) -> None:
        self.blocks = 0
        self._block_us = 0
        self._since_us = 0

    def change(self, blocks: int, now_us: int) -> None:
        """So many more are held from now on, or fewer."""
        self._block_us = self.block_us(now_us)
        self._since_us = now_us
        self.blocks += blocks

    def block_us(self, now_us: int) -> int:
        """Until now, with what is still held."""
        return self._block_us + self.blocks * (now_us - self._since_us)
