"""What a running job does: the flight recorder, traces, and what this machine and this build can do."""
