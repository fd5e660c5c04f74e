"""Triggers: what is waited for without a worker slot."""
