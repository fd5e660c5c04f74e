"""Operators: the steps one by one, all of them in one task, and the reaper."""
