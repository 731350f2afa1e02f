"""Data parallel and sharded training on ringcomm's collectives. Data parallel and all ZeRO stages use the same flat
layout. The public names are exported by `ringcomm`."""
