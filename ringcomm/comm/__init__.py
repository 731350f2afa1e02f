"""Communicators: their collectives, and how ranks find each other."""
