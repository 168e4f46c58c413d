"""Replay: a trace through the real router and modelled engines, in virtual time. `ranvier replay`.

    traces/        files -> TraceRequest: every format has its loader and says what is wrong with which line
    engine/        what an engine is to a router: a block cache with a clock
    replay_run     one run: arrivals, nodes (or an oracle), engines and the gossip between nodes on one clock
    findings       what came of the runs, for the table, the JSON and the one HTML page

Pure but for `replay_command`, `jobs` and the loaders. Nothing here runs in a serving node.
"""
