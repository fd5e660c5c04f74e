"""The work: what to run on the boxes, how it is launched, and why it ended."""
