"""Communicators, their collectives, and the rendezvous of the ranks."""
