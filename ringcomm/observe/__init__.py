"""Observability: the flight recorder, traces, and checks of this machine and this build."""
