"""Stands in for torch where a test needs torchrun's manners without its seven seconds."""
