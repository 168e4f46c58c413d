"""Simulates whole clusters in virtual time from a seed, with faults and checkers."""
