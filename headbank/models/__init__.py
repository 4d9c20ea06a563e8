"""Engines: the only place that knows transformers."""
