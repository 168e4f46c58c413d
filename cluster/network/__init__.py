"""The fake network: virtual time, conditions of links, and what they do to packets. Pure; for simulator and tests."""
