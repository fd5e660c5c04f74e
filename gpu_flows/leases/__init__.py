"""The promise: nothing that was rented outlives its lease."""
