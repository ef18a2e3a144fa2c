"""Adapters to trainers, one module each, imported when asked for: each needs an extra of its own."""
