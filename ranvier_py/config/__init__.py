"""The configuration: one model, from which the TOML file, the environment, the flags and the reference follow."""
