"""
Trains a small GPT on text over several ranks, on any mesh: data, tensor, pipeline, context parallel, any ZeRO stage.

    torchrun --nproc-per-node 2 examples/train_gpt.py                     # data parallel (stage 0)
    torchrun --nproc-per-node 2 examples/train_gpt.py --stage 3           # parameters sharded too
    torchrun --nproc-per-node 8 examples/train_gpt.py --dp 2 --tp 2 --pp 2 --micro-batches 4 --stage 1
    torchrun --nproc-per-node 2 examples/train_gpt.py --cp 2 --check      # windows split; compared with one process
    torchrun --nproc-per-node 2 examples/train_gpt.py --stages            # 0, 1, 2, 3 in turn: the same bits
    torchrun --nproc-per-node 2 examples/train_gpt.py --parallel torch    # our collectives under torch's DDP
    torchrun --nproc-per-node 2 examples/train_gpt.py --backend gloo      # Gloo
    torchrun --nproc-per-node 2 examples/train_gpt.py --compare           # Gloo and ringcomm, step by step in turns
    torchrun --max-restarts 3 --nproc-per-node 2 examples/train_gpt.py --save run --save-every 100   # survives failures

A step has dp x --accumulate x --micro-batches micro-batches of --batch windows; meshes with the same product see the
same windows. If these are powers of two, and each rank has the same number of threads (OMP_NUM_THREADS), dp, pp, the
schedule and the stage do not change the bits of losses and parameters. tp and cp change them, because they add in
another order, and float16 may change them, because its loss scale differs. The text is the language reference that
ships with every Python, or `--text FILE`; the tokens are its bytes.
"""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
from check import check
from compare import contestants, predict, torch_training
from gpt import GPT
from mesh import add_flags, axes_of, checksum, described, refusal, whole_state
from report import Peak, figures, mean_over_ranks, train
from resume import Saved
from stages import run_stages
from text import printable, read_text
from training import PRECISIONS, Training, batches_of, plain_training, sharded_training, tokens_per_step

import ringcomm

ENOUGH_STEPS = 200  # after fewer steps, the model's samples are noise


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(p)
    p.add_argument("--stage", type=int, choices=range(4), default=0, help="ZeRO stage over dp and cp (0)")
    for name, default, text in (
        ("steps", 1500, "optimizer steps"), ("batch", 4, "windows in a micro-batch"),
        ("context", 64, "bytes per window"), ("layers", 4, "transformer blocks"), ("dim", 128, "width"),
        ("heads", 4, "attention heads"), ("seed", 0, "seed of parameters and data"),
        ("sample", 300, "bytes of text to generate at the end"), ("accumulate", 1, "rounds of micro-batches in a step"),
        ("until", 0, "stop after this step (--steps)"),
        ("save-every", 0, "steps between checkpoints in the folder --save; training resumes from the newest"),
    ):  # fmt: skip
        p.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    p.add_argument("--lr", type=float, default=3e-3, help="learning rate (0.003)")
    p.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients (0: no clipping)")
    p.add_argument("--precision", choices=list(PRECISIONS), default="fp32", help="of forward and backward (fp32)")
    p.add_argument("--bucket-mb", type=float, default=None, help="bucket size in MiB (default: measured)")
    p.add_argument("--text", metavar="FILE", help="train on this file (default: Python's language reference)")
    p.add_argument("--save", metavar="PATH", help="save a checkpoint at the end")
    p.add_argument("--resume", metavar="PATH", help="resume from a checkpoint of any stage and mesh")
    p.add_argument("--json", metavar="FILE", help="write the figures at the end to this file")
    p.add_argument(
        "--log",
        metavar="FILE",
        help="write a JSON object per step, with ringcomm's counters, for loggers such as wandb",
    )
    p.add_argument("--check", action="store_true", help="train in one process too; exit status 1 if the results differ")
    p.add_argument("--stages", action="store_true", help="run every stage: same bits, and bytes of each stage")
    p.add_argument("--plot", metavar="FILE", help="write a picture of --stages to this file")
    p.add_argument("--backend", choices=["ringcomm", "gloo"], default="ringcomm")
    p.add_argument("--parallel", choices=["ringcomm", "torch"], default="ringcomm", help="shard, or torch's DDP")
    p.add_argument("--compare", action="store_true", help="Gloo, ringcomm and no communication, step by step in turns")
    a = p.parse_args()
    a.until = a.until or a.steps
    return a


def refused(a: argparse.Namespace, ranks: int) -> str | None:
    """Returns a sentence that says why these flags cannot be combined; None if they can."""
    ours = a.parallel == "ringcomm" and not a.compare
    mesh = a.tp * a.pp * a.cp > 1
    if a.save_every and (a.save_every < 0 or not a.save):
        return (
            f"train_gpt: got --save-every {a.save_every} with --save {a.save}, expected a number above 0 and a folder; "
            "give both"
        )
    if not ours and (a.stage or a.stages or a.precision != "fp32" or a.save or a.resume or a.check or mesh):
        return (
            "train_gpt: got --compare or --parallel torch with --tp, --pp, --cp, --stage, --stages, --precision, "
            "--save, --resume or --check, expected none of these, which are of our own training; leave one out"
        )
    if a.stages and (a.save or a.resume or a.check or a.until != a.steps):
        return (
            "train_gpt: got --stages with --save, --resume, --check or --until, expected none of these: it runs from "
            "beginning to end; leave one out"
        )
    if (a.json or a.log) and (a.compare or a.stages):
        return "train_gpt: got --json or --log with --compare or --stages, expected one training alone; leave one out"
    return refusal(a, ranks)


def main() -> None:
    a = parse()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, value)  # without torchrun: a world of one rank
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
    if here == int(os.environ["WORLD_SIZE"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo" if a.compare else a.backend)
    ranks = dist.get_world_size()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) // here)))
    wrong = refused(a, ranks)
    if wrong and dist.get_rank() == 0:
        print(wrong, file=sys.stderr, flush=True)
    dist.barrier()  # the sentence is printed before torchrun sees the first rank exit
    if wrong:
        raise SystemExit(2)
    text = read_text(a.text)
    if a.compare:
        run_comparison(a, text)
    elif a.stages:
        warm_up(a, text)
        run_stages(a, text, ringcomm.init_mesh(axes_of(a, ranks)))
    else:
        run_one(a, text, ringcomm.init_mesh(axes_of(a, ranks)))
    dist.barrier()
    dist.destroy_process_group()


def warm_up(a: argparse.Namespace, text: torch.Tensor) -> None:
    """Runs a step of a tiny model on this rank alone, so that the memory that torch allocates at its first step is
    not counted."""
    one = {"dp": 1, "tp": 1, "pp": 1, "cp": 1, "layers": 1, "heads": 1, "dim": 16, "micro_batches": 1, "accumulate": 1}
    small = argparse.Namespace(**{**vars(a), **one, "batch": 1})
    mesh = ringcomm.init_mesh({"pp": 1, "dp": 1, "cp": 1, "tp": 1}, ringcomm.init(0, 1))
    plain_training(small, "warm-up", mesh).step(batches_of(small, text, mesh).draw())


def run_comparison(a: argparse.Namespace, text: torch.Tensor) -> None:
    """Trains three copies of the model, step by step in turns."""
    copies = contestants(a)
    introduce(a, copies[0], text)
    train(a, copies, batches_of(a, text, copies[0].mesh))
    figures(a, copies, None)
    predict(a, copies)
    finish(a, copies[0], copies[0].model.module if a.parallel == "torch" else copies[0].model)


def run_one(a: argparse.Namespace, text: torch.Tensor, mesh: ringcomm.Mesh) -> None:
    """Runs a training, from its beginning or from a checkpoint."""
    warm_up(a, text)
    peak = Peak()
    if a.parallel == "torch":
        training = torch_training(a, a.backend, mesh)
    else:
        training = sharded_training(a, a.backend, mesh, a.stage)
    batches = batches_of(a, text, mesh)
    saved = Saved(a, training, batches) if a.save_every else None
    done = saved.resume() if saved else 0
    if a.resume and done == 0:
        done = training.resume(a.resume, batches)
    introduce(a, training, text)
    log = StepLog(a.log, training) if a.log and dist.get_rank() == 0 else None

    def after(step: int) -> None:
        if log:
            log.write(step)
        if saved:
            saved.after(step)

    train(a, [training], batches, done, peak, after=after)
    peak.stop()
    if a.save and not saved:
        training.save(a.save, batches)
    found = figures(a, [training], peak) if done < a.until else {"loss": training.loss, "losses": training.losses}
    state = finish(a, training, training.model.module if a.parallel == "torch" else training.model)
    if dist.get_rank() == 0 and a.json:
        with open(a.json, "w", encoding="utf-8") as file:
            json.dump({**found, "parameters": checksum(state), "mesh": axes_of(a, mesh.comm.world_size)}, file)
    if a.check:
        right = check(a, training, state, text) if dist.get_rank() == 0 else True
        if mean_over_ranks(float(right)) < 1.0:
            raise SystemExit(1)


class StepLog:
    """Writes a line of JSON for each step: its loss and time, and ringcomm's counters in this step. Other loggers take
    the same dict: `wandb.log(line)`, or `writer.add_scalar(name, value, step)` for each of its values."""

    def __init__(self, path: str, training: Training) -> None:
        self.path, self.training = path, training
        self.before = ringcomm.metrics()

    def write(self, step: int) -> None:
        now = ringcomm.metrics()
        counted = {f"ringcomm/{name}": now[name] - self.before.get(name, 0) for name in now if name != "communicators"}
        self.before = now
        line = {"step": step, "loss": self.training.loss, "seconds": self.training.seconds[-1], **counted}
        with open(self.path, "a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)


def introduce(a: argparse.Namespace, training: Training, text: torch.Tensor) -> None:
    """Prints a line that describes the training."""
    mesh = training.mesh
    ranks = mesh.comm.world_size
    if dist.get_rank() == 0:
        with torch.device("meta"):
            count = sum(p.numel() for p in GPT(a.layers, a.dim, a.heads, a.context).parameters())
        laid = f" ({described(axes_of(a, ranks))})" if ranks > 1 else ""
        print(
            f"{count / 1e6:.2f} M parameters, {len(text):,} bytes of text, {ranks} rank{'s' * (ranks > 1)}{laid}, "
            f"{tokens_per_step(a, mesh)} tokens per step, {a.until} steps",
            flush=True,
        )


def finish(a: argparse.Namespace, training: Training, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Prints the full model's checksum and a sample of its text, and returns its parameters; a collective."""
    state = whole_state(model, training.mesh)
    if dist.get_rank() == 0:
        print(f"parameters: {checksum(state)}")
        if a.sample and a.until < ENOUGH_STEPS:
            print(f"\nNo sample of generated text: {a.until} steps are too few for words, {ENOUGH_STEPS} are enough.")
        elif a.sample:
            whole = GPT(a.layers, a.dim, a.heads, a.context)
            whole.load_state_dict(state)
            print("\n" + "-" * 40 + "\n" + printable(whole.sample(b"The ", a.sample, a.seed)))
    return state


if __name__ == "__main__":
    main()
