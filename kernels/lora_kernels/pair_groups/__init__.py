"""Pairs grouped by (adapter, expert) cell for the decode path. Needs triton."""

from lora_kernels.pair_groups.op import GROUP, PairGroups, can_group, group_pairs

__all__ = ["GROUP", "PairGroups", "can_group", "group_pairs"]
