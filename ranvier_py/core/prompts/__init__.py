"""Request bodies -> Prompt: canonical form, templates, boundaries, fingerprints."""
