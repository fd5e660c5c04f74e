"""The composition: the steps, the whole run, and its report."""
