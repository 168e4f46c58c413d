"""The fake network: virtual time, conditions of links, and their effect on packets. Pure; for simulator and tests."""
