"""Trials of the fault campaign."""
