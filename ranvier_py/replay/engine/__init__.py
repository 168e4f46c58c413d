"""What an engine is to a router: a block cache with a clock. The lab's fake engine drives the same code.

    model.py         submit, advance, cancel, restart; and what an oracle may ask
    batch.py         steps: who computes what when, and leaps over decoding
    block_cache.py   blocks, found by name, evicted oldest first
    forecast.py      when a request would get its first token
    presets.py       engines by name, with the arithmetic they come from
    values.py        limits, events, refusals, statistics

Pure: no waiting, no chance, no clock but the caller's.
"""
