"""What serving eight adapters costs beside the base alone, on one GPU: vLLM, vLLM with adapters, Tenantry's engine, the whole path."""
