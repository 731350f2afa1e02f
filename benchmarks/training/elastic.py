"""Kills and restarts one of several hosts during a job, and checks that the job ends with the bits of an undisturbed
one.

    python -m benchmarks.training.elastic --out benchmarks/results/elastic.txt

Hosts are network namespaces joined by links of a given bandwidth and delay (tests/support/hierarchy/namespaces.py;
needs root). Each runs a torchrun agent with --rdzv-backend c10d. When a checkpoint exists, all processes of the last
host are killed (SIGKILL), and its agent is started again two seconds later. Exit status 1 if the checksums of the
parameters differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.hierarchy.namespaces import Cluster, address, why_not

ROOT = Path(__file__).resolve().parents[2]
PORT = 29400


def words_of(a: argparse.Namespace, folder: Path) -> list[str]:
    """Returns the command line of the program that every rank runs."""
    words = [str(ROOT / "examples" / "train_gpt.py"), "--stage", str(a.stage), "--steps", str(a.steps)]
    return [*words, "--sample", "0", "--save", str(folder / "run"), "--save-every", str(a.save_every)]


class Job:
    """An agent on each host of a cluster, and their output."""

    def __init__(self, cluster: Cluster, a: argparse.Namespace, folder: Path) -> None:
        self.cluster, self.a, self.folder = cluster, a, folder
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.began = time.monotonic()
        for host in range(cluster.hosts):
            self.start(host)

    def start(self, host: int) -> None:
        """Starts the same command, even when the host comes back."""
        conf = f"is_host={int(host == 0)},keep_alive_interval=1,keep_alive_max_attempt=3"
        options = [f"--nnodes={self.cluster.hosts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={address(0)}:{PORT}"]
        options += [f"--rdzv-conf={conf}", f"--local-addr={address(host)}", "--max-restarts=3"]
        with self.output(host).open("ab") as out:
            self.agents[host] = self.cluster.torchrun(
                host, self.a.ranks, words_of(self.a, self.folder), options, stdout=out, stderr=subprocess.STDOUT,
                env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )  # fmt: skip

    def output(self, host: int) -> Path:
        return self.folder / f"host{host}.txt"

    def kill(self, host: int) -> int:
        """Kills all processes of a host; returns their number."""
        found = subprocess.run(["ip", "netns", "pids", self.cluster.names[host]], capture_output=True, text=True)
        for pid in (pids := found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.agents[host].wait()
        return len(pids)

    def wait_for_step(self, step: int) -> None:
        """Waits until the step's checkpoint is complete."""
        while not (self.folder / "run" / f"step-{step:08d}").exists():
            if any(agent.poll() is not None for agent in self.agents.values()):
                raise SystemExit(f"elastic: an agent ended before step {step}\n{self.said()[-3000:]}")
            time.sleep(0.05)

    def finish(self) -> tuple[str, float]:
        """Returns the checksum of the parameters, and the seconds since the start."""
        for agent in self.agents.values():
            if agent.wait(600) != 0:
                raise SystemExit(f"elastic: an agent ended with {agent.returncode}\n{self.said()[-3000:]}")
        return re.findall(r"parameters: (\w+)", self.said())[-1], time.monotonic() - self.began

    def said(self) -> str:
        """Returns the output of all hosts."""
        return "\n".join(self.output(host).read_text(errors="replace") for host in self.agents)


def run(a: argparse.Namespace, cluster: Cluster, kill_at: int) -> tuple[str, list[str]]:
    """Runs one job, interrupted unless ``kill_at`` is 0; returns the checksum, and a report in lines."""
    story = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(cluster, a, Path(folder))
        if kill_at:
            job.wait_for_step(kill_at)
            killed = job.kill(cluster.hosts - 1)
            story.append(
                f"{time.monotonic() - job.began:6.1f} s  step {kill_at} is saved; host{cluster.hosts - 1} is killed, "
                f"{killed} processes"
            )
            time.sleep(2)
            job.start(cluster.hosts - 1)
            story.append(f"{time.monotonic() - job.began:6.1f} s  its agent is started again")
        checksum, seconds = job.finish()
        said = job.said()
        errors = re.findall(r"\[rank0\]: (ringcomm\.errors\.\w+: [^(\n]*)", said)
        story += [f"          rank 0 then said: {line.strip()}" for line in errors[:1]]
        story += [f"          a rank then said: goes on from step {s}" for s in re.findall(r"from step (\d+)", said)]
        story.append(f"{seconds:6.1f} s  {a.steps} steps are made, parameters: {checksum}")
    return checksum, story


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hosts", type=int, default=2)
    p.add_argument("--ranks", type=int, default=2, help="on each host (2)")
    p.add_argument("--gbps", type=float, default=1.0, help="of each host's link (1)")
    p.add_argument("--delay-ms", type=float, default=1.0, help="one way (1)")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--stage", type=int, default=2)
    p.add_argument("--save-every", type=int, default=20)
    p.add_argument("--kill-at", type=int, default=60, help="step whose checkpoint is waited for (60)")
    p.add_argument("--out", metavar="FILE", help="write it there too")
    a = p.parse_args()
    if reason := why_not():
        raise SystemExit(f"elastic: {reason}")
    lines = [f"$ python -m benchmarks.training.elastic {' '.join(sys.argv[1:])}"]
    lines.append(f"{a.hosts} hosts x {a.ranks} ranks, {a.gbps:g} Gbit/s, {a.delay_ms:g} ms, stage {a.stage}")
    sums = []
    for title, kill_at in (("without a failure", 0), ("with one", a.kill_at)):
        with Cluster(a.hosts, a.gbps, a.delay_ms) as cluster:
            checksum, story = run(a, cluster, kill_at)
        sums.append(checksum)
        lines += ["", f"{title}:", *story]
        print("\n".join(lines[-len(story) - 2 :]), flush=True)
    lines += ["", "the same bits" if sums[0] == sums[1] else "DIFFERENT bits"]
    print(lines[-1])
    if a.out:
        Path(a.out).write_text("\n".join(lines) + "\n")
    raise SystemExit(int(sums[0] != sums[1]))


if __name__ == "__main__":
    main()
