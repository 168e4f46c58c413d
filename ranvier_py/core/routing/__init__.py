"""Where a request goes: the Router with backends, attempts, route table and placement."""
