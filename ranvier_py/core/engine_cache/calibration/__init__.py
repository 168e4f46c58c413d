"""Compares predicted with reported cache hits: how far predictions are off, and how much an engine keeps."""
