"""The stages of a call, one module each. `pipeline` has them in order."""
