"""The commands of `ringcomm`."""
