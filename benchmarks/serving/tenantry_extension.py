"""The worker's own extension with what the benchmark measures by; for Tenantry's engine."""

# pyright: basic, reportMissingImports=false

from benchmarks.serving.random_weights import Measured
from services.worker.vllm_slots import WorkerExtension


class Extension(Measured, WorkerExtension):
    pass
