"""Whom a failure blames: what an error answer shows of its backend, and which backends are passed over for whom."""
