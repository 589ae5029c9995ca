"""(token, expert, adapter) pairs grouped on the device into tiles of one cell, once per layer, for w13 and w2 alike."""

from lora_kernels.work_list.build import WorkList, build_work_list

__all__ = ["WorkList", "build_work_list"]
