"""The pure core: values and state machines. No waiting, clock, log, socket or global random numbers."""
