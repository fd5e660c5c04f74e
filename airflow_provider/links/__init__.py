"""Links from a task to where its box is shown."""
