"""
`ringcomm bench`: bandwidth and latency of every collective, with nccl-tests' flags, columns and exit status.

    ringcomm bench -g 2 -b 1K -e 64M -f 4 --peer gloo --limit --plot all_reduce.png
    torchrun --nproc-per-node 4 -m ringcomm bench reduce_scatter all_gather -b 1M -e 16M -f 2
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from ringcomm.errors import AbortedError, InvalidArgumentError
from ringcomm.replace import VARIABLE
from ringcomm.tools.bench.options import Options, parse_options

if TYPE_CHECKING:
    from ringcomm.tools.bench.report import Table


def run(options: Options) -> list[Table]:
    """
    Runs the benchmark on newly started ranks, or as one rank of torchrun's world.

    Returns: one table per collective and cycle. Raises: the first exception of a rank.
    """
    import ringcomm
    from ringcomm.tools.bench.run import run_rank

    _check_peer(options.peer)
    if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
        if options.ranks not in (None, int(os.environ["WORLD_SIZE"])):
            raise SystemExit(
                f"ringcomm bench: got -g {options.ranks} in torchrun's world of {os.environ['WORLD_SIZE']}; omit -g"
            )
        with ringcomm.init(timeout=timedelta(seconds=options.timeout_s), device=options.device) as comm:
            try:
                return run_rank(comm, options)
            except AbortedError as error:
                if BrokenPipeError.__name__ in str(error):  # on rank 0: nobody reads its output any more
                    raise BrokenPipeError from error
                raise
    ranks = options.ranks or 2
    return ringcomm.run_ranks(
        run_rank, ranks, options, ranks=options.ranks_as, timeout=options.timeout_s, device=options.device
    )[0]


def _check_peer(peer: str | None) -> None:
    """Raises for a backend that this torch does not have, before a rank is started."""
    import torch.distributed as dist

    if peer is None or (peer in dist.Backend.backend_list and dist.is_backend_available(peer)):
        return
    usable = [name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)]
    raise InvalidArgumentError(f"bench: got --peer {peer}, this torch has {', '.join(usable)}; pass one of these")


def main(argv: Sequence[str]) -> int:
    """
    Runs the command.

    Returns: the exit status: 0; 1 for a wrong element or an average bus bandwidth below --min-bw; 130 after Ctrl-C.
    Raises:  InvalidArgumentError, UnsupportedError: the flags ask for something unavailable.
    """
    options = parse_options(argv)
    os.environ.pop(VARIABLE, None)  # so that --peer gloo is Gloo
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        tables = run(options)
    except KeyboardInterrupt:
        print("ringcomm bench: interrupted", file=sys.stderr)
        return 130
    if os.environ.get("RANK", "0") == "0":
        _write(tables, options, started)
    return int(any(table.wrong or table.too_slow(options.min_bw) for table in tables))


def _write(tables: list[Table], options: Options, started: str) -> None:
    from ringcomm.tools.bench import report

    if options.json:
        report.write_json(options.json, report.as_json(tables, options, tables[0].devices, started))
        print(f"# Wrote {options.json}")
    if options.plot:
        report.plot(options.plot, tables)
        print(f"# Wrote {options.plot}")
