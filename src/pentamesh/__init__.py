"""Pentamesh: plan, prove and run an LLM training job over five parallel axes."""

__version__ = "0.1.0"
