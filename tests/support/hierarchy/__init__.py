"""What ranks on several hosts run, and hosts that are network namespaces."""
