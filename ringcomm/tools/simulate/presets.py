"""Clusters by name, each with the sources of its numbers. Where you can measure, use
`ringcomm.tools.simulate.calibrate`."""

from __future__ import annotations

from collections.abc import Callable

from ringcomm.tools.simulate import ENGINE, Cluster, LinkClass
from ringcomm.validation import expects, one_of


def h100(hosts: int = 1, ranks_per_host: int = 8) -> Cluster:
    """Returns hosts of H100 GPUs on NVSwitch, with a 400 Gbit/s NIC for each GPU."""
    return Cluster(
        hosts,
        ranks_per_host,
        inside=LinkClass(latency_us=0.6, bandwidth_gbps=371.0),
        between=LinkClass(latency_us=14.0, bandwidth_gbps=48.0, overhead_us=1.0, reduce_gbps=900.0, **ENGINE),
        call_us=4.6,
        sources={
            "inside": (
                "18 NVLinks of 20.6 GB/s, the part of the line rate of 450 GB/s that NCCL counts on, and 0.6 us a hop "
                "(NCCL 2.30, graph/topo.h and graph/tuning.cc); a call 4.6 us, so that 1 KiB take the 5.2 us of "
                "mscclpp#646 under a graph (NCCL counts on 4.5); reductions part of the transfer, none in the switch"
            ),
            "between": (
                "50 GB/s of line rate for each GPU, 4 % of it assumed lost, 14 us a hop (NCCL's ring over a network), "
                "1 us a message (assumed); reductions assumed to read and write 2.7 TB/s of memory three times"
            ),
        },
    )


def a100(hosts: int = 1, ranks_per_host: int = 8) -> Cluster:
    """Returns hosts of A100 GPUs on NVSwitch, with a 200 Gbit/s NIC for each GPU."""
    return Cluster(
        hosts,
        ranks_per_host,
        inside=LinkClass(latency_us=0.6, bandwidth_gbps=246.0),
        between=LinkClass(latency_us=14.0, bandwidth_gbps=24.0, overhead_us=1.0, reduce_gbps=450.0, **ENGINE),
        call_us=5.0,
        sources={
            "inside": "82 % of the line rate of 300 GB/s, as on H100, and 0.6 us a hop; a call 5 us (assumed)",
            "between": (
                "25 GB/s of line rate for each GPU, 4 % of it assumed lost, 14 us a hop, 1 us a message (assumed); "
                "reductions assumed to read and write 1.35 TB/s of memory three times"
            ),
        },
    )


def ethernet(hosts: int = 2, ranks_per_host: int = 2, gbit: float = 10.0, latency_us: float = 50.0) -> Cluster:
    """Returns CPU hosts whose ranks use shared memory, and share one NIC of ``gbit`` Gbit/s."""
    return Cluster(
        hosts,
        ranks_per_host,
        inside=LinkClass(latency_us=3.0, bandwidth_gbps=5.0),
        between=LinkClass(latency_us, gbit / 8 * 0.94, overhead_us=10.0, reduce_gbps=5.0, **ENGINE),
        shared_nic=True,
        sources={
            "inside": "5 GB/s and 3 us, as two cores of a small virtual machine reach through shared memory",
            "between": (
                f"one link for a host: 94 % of the line rate (TCP in frames of 1500 bytes), {latency_us:g} us one way, "
                "10 us of a rank's time a message and reductions at 5 GB/s (assumed)"
            ),
        },
    )


PRESETS: dict[str, Callable[[int, int], Cluster]] = {
    "h100": h100,
    "a100": a100,
    "ethernet-1g": lambda hosts, ranks: ethernet(hosts, ranks, 1.0, 100.0),
    "ethernet-10g": lambda hosts, ranks: ethernet(hosts, ranks, 10.0, 50.0),
    "ethernet-100g": lambda hosts, ranks: ethernet(hosts, ranks, 100.0, 20.0),
}


@expects("preset", name=one_of(*PRESETS))
def preset(name: str, hosts: int, ranks_per_host: int) -> Cluster:
    """Returns a cluster by name.

    Raises:  InvalidArgumentError: no preset has this name.
    """
    return PRESETS[name](hosts, ranks_per_host)
