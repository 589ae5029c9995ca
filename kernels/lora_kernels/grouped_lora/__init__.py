"""Low-rank updates of rows grouped by adapter slot (dense layers) or by adapter slot and expert (MoE layers)."""

from lora_kernels.grouped_lora.reference import RowGroups, add_lora_, expand_, group_routed_rows, group_rows, shrink

__all__ = ["RowGroups", "add_lora_", "expand_", "group_routed_rows", "group_rows", "shrink"]
