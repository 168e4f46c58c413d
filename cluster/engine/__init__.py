"""The fake engine: vLLM's HTTP over a block cache in real time, with KV events, and faults on demand."""
