"""The embedded cloud: boxes on this machine, each with an SSH endpoint on loopback and a home of its own."""
