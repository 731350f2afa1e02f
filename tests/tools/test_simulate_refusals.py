"""What the simulator refuses: calls, links and clusters that are none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ringcomm import _C, errors
from ringcomm.tools.simulate import Cluster, LinkClass, predict


def layered_cluster(hosts: int, ranks: int, **between: Any) -> Cluster:
    return Cluster(hosts, ranks, LinkClass(1.0, 50.0), LinkClass(7.0, 2.0, **between))


@pytest.mark.parametrize(("words", "match"), [
    ({"collective": "scatter"}, "got collective='scatter'"),
    ({"algorithm": "butterfly"}, "got algorithm 'butterfly' for all_reduce on 3 hosts"),
    ({"algorithm": "oneshot"}, "expected one of ring, direct"),
    ({"dtype": "float12"}, "got dtype='float12'"),
    ({"nbytes": -1}, "got nbytes=-1"),
    ({"root_host": 3}, "got root_host 3"),
])  # fmt: skip
def test_invalid_calls_are_refused(words: dict[str, Any], match: str) -> None:
    call = {
        "collective": "all_reduce",
        "nbytes": 1024,
        "algorithm": "auto",
        "dtype": "float32",
        "root_host": 0,
        **words,
    }
    with pytest.raises(errors.InvalidArgumentError, match=match):
        predict(**call, cluster=layered_cluster(3, 2))


@pytest.mark.parametrize(("change", "match"), [
    ({"latency_us": -1.0}, "latency_us -1"), ({"latency_us": math.nan}, "latency_us nan"),
    ({"bandwidth_gbps": 0.0}, "bandwidth_gbps 0"), ({"reduce_gbps": -2.0}, "reduce_gbps -2"),
    ({"overhead_us": math.inf}, "overhead_us inf"), ({"slots": 0}, "slots 0"),
])  # fmt: skip
def test_invalid_links_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=match):
        predict("all_reduce", 64, layered_cluster(2, 2, **change) if "slots" in change else replace(
            layered_cluster(2, 2), between=replace(LinkClass(1.0, 1.0), **change)))  # fmt: skip


def test_invalid_clusters_are_refused() -> None:
    base = layered_cluster(2, 2)
    with pytest.raises(errors.InvalidArgumentError, match="got stragglers for number 4, expected one below 4"):
        replace(base, stragglers={4: 1.0})
    with pytest.raises(errors.InvalidArgumentError, match="got slow_hosts for number -1"):
        replace(base, slow_hosts={-1: 1.0})
    with pytest.raises(errors.InvalidArgumentError, match="got wire='int8'"):
        replace(base, wire="int8")
    for change, match in (
        ({"slow_hosts": {0: 0.0}}, "slow_hosts="), ({"stragglers": {0: -1.0}}, "start_us -1"),
        ({"slow_ranks": {0: 0.0}}, "slowdown 0"), ({"hosts": 0}, "hosts 0"),
        ({"ranks_per_host": 0}, "ranks_per_host 0"), ({"hosts": 1 << 19, "ranks_per_host": 8}, "ranks 4.1943e\\+06"),
    ):  # fmt: skip
        with pytest.raises(errors.InvalidArgumentError, match=match):
            predict("all_reduce", 64, replace(base, **change))


def test_too_many_cases_are_refused_at_once() -> None:
    cluster = replace(layered_cluster(1 << 15, 8), slow_hosts={0: 0.5})
    with pytest.raises(errors.InvalidArgumentError, match="messages to look at, expected at most 2e\\+10"):
        predict("all_reduce", 1 << 30, cluster, "flat_direct")


def test_the_core_refuses_what_python_does_not_ask_for() -> None:
    question: dict[str, Any] = {
        "collective": "broadcast", "between": "ring", "inside": "direct", "flat": False, "hosts": 2,
        "ranks_per_host": 2, "count": 64, "element_bytes": (4,) * 4,
        "inside_link": (1.0, 1.0, 0.0, 1.0, 0, 0, 1, 0, False),
        "between_link": (1.0, 1.0, 0.0, 1.0, 0, 0, 1, 0, False), "shared_nic": False, "link_share": [], "start_us": [],
        "slowdown": [], "root_host": 0, "fold": True,
    }  # fmt: skip
    assert _C.simulate(**question)["time_us"] > 0
    for change, match in (
        ({"between": "butterfly"}, "broadcast that is not a ring"),
        ({"collective": "all_to_all"}, "all_to_all that is not direct"),
        ({"collective": "all_reduce", "inside": "oneshot"}, "oneshot for what it does not do"),
        ({"collective": "all_reduce", "hosts": 3, "between": "butterfly"}, "members of a butterfly 3"),
        ({"between": "star"}, "schedule between hosts 'star'"),
        ({"link_share": [1.0]}, "1 entries of link_share, expected 2"),
    ):  # fmt: skip
        with pytest.raises(errors.InvalidArgumentError, match=match):
            _C.simulate(**{**question, **change})
