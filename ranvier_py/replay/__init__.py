"""Replay: a trace through the real router and modelled engines, in virtual time. `ranvier replay`.

    traces/     files -> TraceRequest: every format has its loader and says what is wrong with which line
    engine/     what an engine is to a router: a block cache with a clock
    run.py      one run: arrivals, nodes, engines and the gossip between nodes on one clock
    report      what a run says: a table, JSON, one HTML page

Pure but for `command.py` and the loaders, which read files. Nothing here runs in a serving node.
"""
