"""`ringcomm bench`: bandwidth and latency of the collectives."""
