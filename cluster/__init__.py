"""The lab, never installed: nodes behind DNS round-robin, fake engines, traffic, faults. `python -m cluster`."""
