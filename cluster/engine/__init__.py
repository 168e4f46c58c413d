"""The fake engine: vLLM's HTTP over a block cache with a clock, KV events, faults on demand."""
