"""`ringcomm run`, RINGCOMM_REPLACE, the entry points: programs that name Gloo or NCCL run over ringcomm as they are."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from ringcomm import errors, replace
from ringcomm.tools import cli
from tests.backend.test_torch_stack import Numbers, batch, model, parameters
from tests.support import ROOT, torch_ranks


def entry_points() -> dict[str, dict[str, str]]:
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which this checkout is installed, beside any other installation."""
    folder = tmp_path / "site" / "ringcomm-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ringcomm\nVersion: 0.1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in entry_points().items()
    )
    (folder / "entry_points.txt").write_text("\n".join(groups))
    removed = ("RINGCOMM_REPLACE", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return {**kept, "PYTHONPATH": f"{folder.parent}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def python(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=100)


# ---- entry points --------------------------------------------------------------------------------------------------


def test_torch_s_entry_point_registers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 calls it, after `import ringcomm` too."""
    (name, value), *others = entry_points()["torch.distributed.backends"].items()
    assert (name, others) == ("ringcomm", [])
    load = EntryPoint(name, value, "torch.distributed.backends").load
    monkeypatch.delitem(dist.Backend._plugins, "RINGCOMM")
    load()()
    registered = dist.Backend._plugins["RINGCOMM"]
    load()()
    assert dist.Backend._plugins["RINGCOMM"] is registered


def test_a_build_that_does_not_load_leaves_torch_alone() -> None:
    program = (
        "import sys, types; torch = types.ModuleType('torch.distributed'); torch.Backend = object\n"
        "sys.modules.update({'torch.distributed': torch, 'ringcomm.backend': None}); import ringcomm; print('done')"
    )
    done = python({**os.environ, "PYTHONPATH": str(ROOT)}, "-c", program)
    assert done.stdout == "done\n", done.stderr
    assert "ringcomm's backend is not registered, because it cannot be imported: import of" in done.stderr


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize(
    ("variable", "value"),
    [("RINGCOMM_METRICS", "on"), ("RINGCOMM_METRICS", "file:at.prom"), ("RINGCOMM_TRACE", __file__)],
)
def test_what_cannot_be_observed_leaves_torch_alone(variable: str, value: str, loads: bool) -> None:
    program = "import sys; sys.modules.update({'ringcomm._C': None} if sys.argv[1:] else {}); import ringcomm; print(1)"
    done = python(
        {**os.environ, "PYTHONPATH": str(ROOT), variable: value}, "-c", program, *[] if loads else ["without"]
    )
    assert done.stdout == "1\n", done.stderr
    told = 0 if loads and value == "file:at.prom" else 1
    assert done.stderr.count("\n") == done.stderr.count(f"ringcomm: this process goes on without {variable}: ") == told


# ---- the command ---------------------------------------------------------------------------------------------------

PROGRAM = """import sys
print(sys.argv, __name__, __file__, sys.path[0], __spec__ is None, {"torch", "ringcomm"} & sys.modules.keys())
def fail():
    raise ValueError("of the program")
fail()
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_program_sees_what_python_shows_it(installed: dict[str, str], tmp_path: Path, module: bool) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["-m", "program"] if module else [str(tmp_path / "program.py")]
    installed["PYTHONPATH"] += os.pathsep + str(tmp_path)
    plain = python(installed, *words, "a", "--replace", "-m")
    ours = python(installed, "-m", "ringcomm", "run", *words, "a", "--replace", "-m")
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert "'--replace', '-m'] __main__" in ours.stdout
    assert ours.stderr.endswith("ValueError: of the program\n")


def test_options_of_python_stay(installed: dict[str, str]) -> None:
    program = "import os, sys; print(sys.flags.utf8_mode, sys.orig_argv[1:3], os.environ['RINGCOMM_REPLACE'])"
    words = ["-X", "utf8=1", "-m", "ringcomm", "run", "--replace", "Gloo, ucc", "-c", program]
    assert python(installed, *words).stdout == "1 ['-X', 'utf8=1'] gloo,ucc\n"


JOB = """import sys, torch, torch.distributed as dist
assert "ringcomm" in sys.modules
rank, world_size = (int(word) for word in sys.argv[1:])
dist.init_process_group("gloo", store=dist.FileStore("store", world_size), rank=rank, world_size=world_size)
for group in (dist.group.WORLD, dist.new_group(backend="nccl")):
    sys.stdout.write(f"{dist.get_backend(group)} {group._get_backend(torch.device('cpu')).name()}\\n")  # at once
dist.destroy_process_group()
"""


def test_a_job_that_names_gloo_and_nccl(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.replace('"store"', repr(str(tmp_path / "store"))))
    done = python(installed, "-W", "ignore", "-m", "ringcomm", "run", str(tmp_path / "job.py"), "0", "1")
    assert done.stdout == "gloo ringcomm\nnccl ringcomm\n", done.stderr
    said = "ringcomm: process groups that ask for gloo or nccl use ringcomm (RINGCOMM_REPLACE)\n"
    assert done.stderr.count("\n") == done.stderr.count(said) == 1


@pytest.mark.slow
@pytest.mark.parametrize("under", [False, True], ids=["run torchrun", "torchrun run"])
def test_torchrun(installed: dict[str, str], tmp_path: Path, under: bool) -> None:
    job = JOB.replace("sys.argv[1:]", '(__import__("os").environ[name] for name in ("RANK", "WORLD_SIZE"))')
    (tmp_path / "job.py").write_text(job.replace('"store"', repr(str(tmp_path / "store"))))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "-m", "ringcomm", "run"] if under else ["-m", "ringcomm", "run", *torchrun]
    done = python({**installed, "PYTHONWARNINGS": "ignore"}, *words, str(tmp_path / "job.py"))
    assert sorted(done.stdout.split("\n")) == ["", *["gloo ringcomm"] * 2, *["nccl ringcomm"] * 2], done.stderr
    assert done.stderr.count("(RINGCOMM_REPLACE)") == 1


def test_what_cannot_run_fails_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        assert cli.main(["run", *words]) == 2
        text = capsys.readouterr().err
        assert text.count("\n") == 1
        return text

    assert "expected a program or -m MODULE, got none" in told("--replace", "gloo")
    assert "got none in ',';" in told("--replace", ",")
    assert "got 'mpi': it takes ranks" in told("--replace", "gloo,mpi", "job.py")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "got TORCH_DEVICE_BACKEND_AUTOLOAD=0; unset it" in told("job.py")
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: EntryPoints(()))
    assert f"got an installation without it; {errors.REINSTALL}" in told("job.py")
    assert cli.main(["run", "--help"]) == 0


# ---- which groups are replaced -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "names", "given"),
    [
        ("gloo", "gloo,nccl", "ringcomm"),
        ("nccl", "gloo,nccl", "ringcomm"),
        ("undefined", "gloo,nccl", "ringcomm"),
        ("cpu:gloo,cuda:nccl", "gloo,nccl", "ringcomm"),
        ("cpu:gloo,cuda:nccl", "gloo", "cpu:ringcomm,cuda:nccl"),
        ("cpu:gloo,xpu:gloo", "gloo", "cpu:ringcomm,xpu:ringcomm"),
        ("gloo", "nccl", "gloo"),
        ("cpu:gloo", "nccl", "cpu:gloo"),
        ("ringcomm", "gloo,nccl", "ringcomm"),
        ("fake", "gloo,nccl", "fake"),
        ("cuda:nccl,cpu:gloo", "gloo", "cpu:ringcomm,cuda:nccl"),
    ],
)
def test_which_backend_is_given(asked: str, names: str, given: str) -> None:
    assert replace.replaced(asked, replace.names_of(names)) == given


@pytest.mark.parametrize("text", ["mpi", "gloo,fake", "undefined", "ringcomm", "cpu:gloo", "gloo nccl", ",", " "])
def test_names_that_cannot_be_replaced(text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="expected names of torch"):
        replace.names_of(text)


@pytest.mark.parametrize(
    ("words", "given"), [(["--replace", "mpi"], "--replace"), (["--replace=,"], "--replace"), ([], "RINGCOMM_REPLACE")]
)
def test_the_error_names_what_gave_the_names(
    words: list[str], given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGCOMM_REPLACE", "mpi")
    assert cli.main(["run", *words, "job.py"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ringcomm run: {given}: expected names of torch.distributed backends")
    assert ("RINGCOMM_REPLACE" in said) is (not words)


@contextlib.contextmanager
def replacing(names: str) -> Iterator[io.StringIO]:
    """What `import torch` does under RINGCOMM_REPLACE, undone at the end; gives what is said meanwhile."""
    before = c10d._new_process_group_helper
    said = io.StringIO()
    try:
        if names:
            replace.install(names)
            assert c10d._new_process_group_helper is not before
            replace.install(names)
        with contextlib.redirect_stderr(said):
            yield said
    finally:
        c10d._new_process_group_helper = before
        replace.install.cache_clear()
        replace._announce.cache_clear()
        replace._advise_unknown.cache_clear()


def real_name(group: Any) -> str:
    return group._get_backend(torch.device("cpu")).name()


def _groups(asked: str | None) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    with replacing("gloo,nccl") as said:
        torch_ranks.init(asked, int(os.environ["RANK"]), 2)
        world = dist.group.WORLD
        assert dist.get_backend() == (asked or "undefined")
        assert dist.get_backend_config() == str(c10d.BackendConfig(c10d.Backend(asked or "undefined")))
        halves = [dist.new_group([rank]) for rank in range(2)]
        own = halves[dist.get_rank()]
        assert halves[1 - dist.get_rank()] == dist.GroupMember.NON_GROUP_MEMBER
        gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        for group in (world, own, gloo, mesh.get_group("b")):
            assert real_name(group) == "ringcomm"
            x = torch.ones(5)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [dist.get_world_size(group)] * 5
        dist.monitored_barrier(gloo)
        found: list[Any] = [None, None]
        dist.all_gather_object(found, {"rank": dist.get_rank()})
        assert found == [{"rank": 0}, {"rank": 1}]
        other = dist.new_group(backend="ringcomm")
        assert dist.get_backend(other) == "ringcomm"
        return said.getvalue()


@pytest.mark.parametrize("asked", ["gloo", None, "cpu:gloo,cuda:nccl"])
def test_groups_keep_the_name_that_was_asked_for(asked: str | None) -> None:
    first, second = torch_ranks.run(_groups, asked, world_size=2, backend="")
    assert first == "ringcomm: process groups that ask for gloo or nccl use ringcomm (RINGCOMM_REPLACE)\n"
    assert second == ""


def _others_stay() -> None:
    with replacing("nccl") as said:
        torch_ranks.init("gloo", int(os.environ["RANK"]), 2)
        assert real_name(dist.group.WORLD) == "gloo"
        torch_ranks._ended_groups.append(dist.group.WORLD)
        options = dist.ProcessGroupGloo._Options()
        assert real_name(dist.new_group(backend="nccl", pg_options=options)) == "ringcomm"
        assert said.getvalue().count("use ringcomm") == (dist.get_rank() == 0)


def test_other_backends_are_not_touched() -> None:
    torch_ranks.run(_others_stay, world_size=2, backend="")


def _unknown_name() -> list[str]:
    with replacing("glooo"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_ranks.init("gloo", int(os.environ["RANK"]), 2)
        torch_ranks._ended_groups.append(dist.group.WORLD)
        dist.barrier(dist.new_group(backend="gloo"))  # a rank that left before would close connections being made
    return [str(each.message) for each in caught if "RINGCOMM_REPLACE" in str(each.message)]


def test_a_name_that_no_backend_has_is_warned_of() -> None:
    first, second = torch_ranks.run(_unknown_name, world_size=2, backend="")
    assert len(first) == 1
    assert first[0].startswith("RINGCOMM_REPLACE: got glooo, expected names of backends of torch.distributed")
    assert second == []


# ---- frameworks, which name their backends themselves --------------------------------------------------------------


def equal_to_gloo(scenario: Callable[..., Numbers]) -> None:
    """Runs a scenario, which makes its process group over Gloo, with and without the replacement."""
    results = []
    for names in ("", "gloo,nccl"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        results.append(torch_ranks.run(_alone, scenario, names, port, world_size=2, backend="", timeout_s=100))
    for theirs, ours in zip(*results, strict=True):
        assert len(theirs) == len(ours) > 0
        assert all(torch.equal(one, other) for one, other in zip(theirs, ours, strict=True))


def _alone(scenario: Callable[..., Numbers], names: str, port: int) -> Numbers:
    os.environ["MASTER_PORT"] = str(port)
    with replacing(names):
        numbers = scenario()
        assert dist.get_backend() == "gloo"
        assert real_name(dist.group.WORLD) == ("ringcomm" if names else "gloo")
        if not names:
            torch_ranks._ended_groups.extend(c10d._world.pg_map)
        return numbers


def examples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, y) for step in range(4) for x, y in zip(*batch(step, 7), strict=True)]


def _accelerate() -> Numbers:
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    module, loader = model(), torch.utils.data.DataLoader(examples(), batch_size=4)
    module, optimizer, loader = accelerator.prepare(module, torch.optim.AdamW(module.parameters()), loader)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)))
    AcceleratorState._reset_state(reset_partial_state=True)
    return losses + parameters(module)


def test_accelerate() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    equal_to_gloo(_accelerate)


def _trainer() -> Numbers:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.inside(x), labels)}

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    folder = os.environ["RINGCOMM_TEST_FOLDER"]
    arguments = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", max_steps=4, logging_steps=1, report_to=[])
    rows = [{"x": x, "labels": y} for x, y in examples()]
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(Classifier(), arguments, train_dataset=rows)
        trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    losses = [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return losses + parameters(trainer.model)


@pytest.mark.slow
def test_hugging_face_trainer() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    equal_to_gloo(_trainer)


def _lightning() -> Numbers:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model()

        def training_step(self, rows: Any, _: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.inside(rows[0]), rows[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    folder = os.environ["RINGCOMM_TEST_FOLDER"]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, default_root_dir=folder, **quiet
    )
    module = Classifier()
    trainer.fit(module, torch.utils.data.DataLoader(examples(), batch_size=4))
    return [trainer.callback_metrics["loss"], *parameters(module)]


@pytest.mark.slow
def test_lightning() -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    equal_to_gloo(_lightning)
