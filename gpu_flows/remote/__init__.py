"""The box, from outside: SSH, files, jobs and logs. Nothing here knows of clouds or leases."""
