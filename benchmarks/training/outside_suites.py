"""Runs the tests of other projects, unmodified, with ringcomm in place of the library that they were written for.

    OMP_NUM_THREADS=1 python -m benchmarks.training.outside_suites accelerate torch-ddp cs336=FOLDER torch-fsdp=FOLDER

A suite is a name, or a name and the checkout that contains its tests. No test is copied: every process of a suite
starts with `adapt`, which replaces names in torch's modules. Each suite runs in one or two ways:

    backend    torch's own classes over the backend "ringcomm"
    api        ringcomm.DistributedDataParallel and ringcomm.fully_shard in the place of torch's, over that backend

A failing test is looked up in VERDICTS, which gives the reason why it does not apply, or the cause of the failure.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import types
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULT = HERE.parent / "results" / "outside_suites.md"
WAY, REPORT, GPUS = (
    "OUTSIDE_SUITES_WAY",
    "OUTSIDE_SUITES_REPORT",
    "OUTSIDE_SUITES_GPUS",
)  # environment variables of the processes of a suite
REFERENCE = "OUTSIDE_SUITES_REFERENCE"  # likewise: torch's DistributedDataParallel stays, as the reference
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


# ---- the adapter, in every process of a suite ---------------------------------------------------------------------


def adapt() -> None:
    """Replaces Gloo by ringcomm and, in the way "api", torch's wrappers."""
    import torch
    import torch.distributed as dist

    import ringcomm
    from ringcomm.data_parallel.fully_shard import FSDPModule

    for name in ("init_process_group", "new_group"):
        replaced = _over_ringcomm(getattr(dist, name))
        setattr(dist, name, replaced)
        setattr(dist.distributed_c10d, name, replaced)
    _answer_the_course(ringcomm)
    for model in (torch.nn.parallel.DistributedDataParallel, ringcomm.DistributedDataParallel):
        _accept_device_ids(model)
    if os.environ[WAY] == "api":
        fsdp: Any = importlib.import_module("torch.distributed.fsdp")
        fsdp.fully_shard, fsdp.FSDPModule = _fully_shard(ringcomm.fully_shard), FSDPModule
        if REFERENCE not in os.environ:
            torch.nn.parallel.DistributedDataParallel = ringcomm.DistributedDataParallel
            torch.nn.parallel.distributed.DistributedDataParallel = ringcomm.DistributedDataParallel
        torch.nn.SyncBatchNorm.convert_sync_batchnorm = lambda module, *_: ringcomm.SyncBatchNorm.convert(module)
    if GPUS in os.environ:
        _without_gpus(int(os.environ[GPUS]))


def _fully_shard(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, which replaces a number in ``reshard_after_forward`` by True, because numbers are
    refused."""

    @functools.wraps(function)
    def with_flag(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("reshard_after_forward")) is int:
            kwargs["reshard_after_forward"] = True
        return function(*args, **kwargs)

    return with_flag


def _accept_device_ids(model: Any) -> None:
    """Makes tests that were written for GPUs wrap a module on the CPU."""
    constructor = model.__init__

    @functools.wraps(constructor)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        constructor(self, *args, **kwargs)

    model.__init__ = on_cpu


def _without_gpus(count: int) -> None:
    """Makes tests that ask for GPUs run on the CPU: objects requested on a GPU are made on the CPU."""
    import torch
    import torch.testing._internal.common_distributed as common
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")

    def is_gpu(value: Any) -> bool:
        return isinstance(value, str | torch.device) and str(value).startswith(("cuda", "npu"))

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if "device" in kwargs and (type(kwargs["device"]) is int or is_gpu(kwargs["device"])):
                kwargs["device"] = cpu
            if getattr(function, "__name__", "") in ("to", "_parse_to"):
                args = tuple(cpu if type(each) is int or is_gpu(each) else each for each in args)
            return function(*args, **kwargs)

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    OnCpu().__enter__()
    torch.Tensor.cuda = torch.nn.Module.cuda = same
    torch.cuda.set_device = lambda *_, **__: None
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.device_count = lambda: count
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda *_, **__: contextlib.nullcontext()
    common.skip_if_lt_x_gpu = lambda *_, **__: lambda function: function
    common.nccl_skip_if_lt_x_gpu = lambda *_: lambda function: function
    common.skip_if_no_gpu = lambda function: function
    common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(
        torch.multiprocessing.get_context("fork").Process
    )  # does not import torch, which would take time
    _without_npus(count)
    if os.environ[WAY] == "api":
        sharded: Any = importlib.import_module("torch.testing._internal.common_fsdp")
        sharded.check_sharded_parity = _check_parity


def _without_npus(count: int) -> None:
    """Does the same for Ascend's copy of the FSDP2 tests, including their imports from torch_npu."""
    import torch
    from torch.testing._internal import common_fsdp

    torch.accelerator.device_count = lambda: count
    torch.Tensor.npu = torch.nn.Module.npu = lambda self, *_, **__: self
    contents: dict[str, dict[str, Any]] = {
        "torch_npu": {},
        "torch_npu.testing": {},
        "torch_npu.testing._internal": {},
        "torch_npu.testing._internal.common_fsdp": {"FSDPNPUTest": common_fsdp.FSDPTest},
        "torch_npu.testing.common_distributed": {"skipIfUnsupportMultiNPU": lambda _: lambda function: function},
        "torch_npu.testing.common_utils": {"SupportedDevices": lambda _: lambda function: function},
    }
    for name, names in contents.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names, __path__=[])
    common_fsdp.FSDPTestMultiThread = common_fsdp.FSDPTest  # over processes, not over torch's threads
    torch.npu = types.SimpleNamespace(
        device_count=lambda: count,
        set_device=lambda _: None,
        current_device=lambda: 0,
        is_initialized=lambda: True,
        is_available=lambda: False,
    )
    meshes, tensors = (
        importlib.import_module("torch.distributed.device_mesh"),
        importlib.import_module("torch.distributed.tensor"),
    )
    make = meshes.init_device_mesh
    meshes.init_device_mesh = lambda kind, *args, **kwargs: make("cpu", *args, **kwargs)
    tensors.init_device_mesh = meshes.init_device_mesh


def _check_parity(case: Any, whole: Any, sharded: Any, prefixes_to_ignore: tuple[str, ...] = ()) -> None:
    """Compares a sharded module's values and gradients with a replicated one's; torch's version accesses DTensors."""
    for (name, p), (other, q) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
        for prefix in prefixes_to_ignore:
            other = other.replace(prefix, "")
        case.assertEqual(name, other)  # noqa: PT009
        case.assertEqual(p.detach(), q.detach().clone())  # noqa: PT009
        case.assertEqual(p.grad is None, q.grad is None)  # noqa: PT009
        if p.grad is not None:
            case.assertEqual(p.grad, q.grad.clone())  # noqa: PT009


def _over_ringcomm(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the same function, with "ringcomm" in place of the backend "gloo"."""

    @functools.wraps(function)
    def with_backend(*args: Any, **kwargs: Any) -> Any:
        args = tuple("ringcomm" if value == "gloo" else value for value in args)
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = "ringcomm"
        return function(*args, **kwargs)

    return with_backend


def _answer_the_course(ringcomm: Any) -> None:
    """Provides the functions that students of CS336 write, as the module that its tests import."""
    import torch

    answers: Any = types.ModuleType("tests.adapters")

    def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
        policy = ringcomm.MixedPrecision(param_dtype=compute_dtype)
        for child in module.modules():
            if child is not module and type(child).__name__ in ("Linear", "Embedding"):
                ringcomm.fully_shard(child, mp_policy=policy)
        return ringcomm.fully_shard(module, mp_policy=policy)

    answers.get_ddp = ringcomm.DistributedDataParallel
    answers.get_fsdp = get_fsdp
    answers.get_sharded_optimizer = ringcomm.ZeroRedundancyOptimizer
    answers.ddp_on_after_backward = answers.fsdp_on_after_backward = lambda model, optimizer: None
    answers.fsdp_gather_full_params = lambda model: model.state_dict()
    sys.modules["tests.adapters"] = answers


def run_script(name: str) -> None:
    """Runs one rank of a script of accelerate: its ``main``, with a line of the report for each of its checks."""
    module = importlib.import_module(name)
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    # accelerate tests these features only with several devices; here it has several processes on the CPU.
    Accelerator.multi_device = property(lambda self: self.distributed_type == DistributedType.MULTI_CPU)
    devices = {each.name: each for each in DistributedType} | {"MULTI_NPU": DistributedType.MULTI_CPU}
    module.DistributedType = types.SimpleNamespace(**devices)
    for key, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and value.__module__ == name and re.search("test|check", key):
            setattr(module, key, _reported(key, value))
    module.main()


def _reported(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        verdict, told = FAILED, ""
        try:
            result = function(*args, **kwargs)
            verdict = PASSED
            return result
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
            raise
        finally:
            with open(f"{os.environ[REPORT]}.{os.environ['RANK']}", "a") as file:
                file.write(json.dumps([name, verdict, told]) + "\n")

    return call


# ---- running a suite ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of one test in one way."""

    suite: str
    way: str
    name: str
    verdict: str
    told: str = ""


@dataclass(frozen=True)
class Suite:
    """Tests of one project, and the function that runs them."""

    title: str
    version: Callable[[Path], str]
    ways: tuple[str, ...]
    run: Callable[[Path, dict[str, str], float], list[tuple[str, str, str]]]
    what: str = ""


def scripts(_: Path, env: dict[str, str], limit_s: float) -> list[tuple[str, str, str]]:
    """Runs the scripts of accelerate, each under torchrun on 2 ranks. A check fails if it fails on any rank."""
    found = []
    env = {**env, "ACCELERATE_USE_CPU": "true"}
    for name in ("script", "sync", "distributed_data_loop", "ops", "ddp_comm_hook"):
        module = f"accelerate.test_utils.scripts.test_{name}"
        with tempfile.TemporaryDirectory() as folder:
            env[REPORT] = f"{folder}/report"
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
                str(HERE / Path(__file__).name),
            ]
            code, output = _started([*command, "--script", module], env, limit_s, Path(folder))
            ranks = [
                [json.loads(line) for line in Path(f"{env[REPORT]}.{rank}").read_text().splitlines()]
                for rank in range(2)
                if Path(f"{env[REPORT]}.{rank}").exists()
            ]
        checks: dict[str, tuple[str, str]] = {}
        for check, verdict, told in (line for rank in ranks for line in rank):
            if checks.get(check, (PASSED, ""))[0] == PASSED:
                checks[check] = (verdict, told)
        if code and all(verdict == PASSED for verdict, _ in checks.values()):
            checks["main"] = (FAILED, output[-2000:])
        found += [(f"{name}.{check}", *outcome) for check, outcome in checks.items()]
    return found


def files(*arguments: str, per_test_s: int = 60) -> Callable[[Path, dict[str, str], float], list[tuple[str, str, str]]]:
    """Returns a function that runs tests in the checkout with pytest."""

    def run(checkout: Path, env: dict[str, str], limit_s: float) -> list[tuple[str, str, str]]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={per_test_s}"]
            _, output = _started([*command, f"--junitxml={report}", *arguments], env, limit_s, checkout)
            if not report.exists():
                return [("all", FAILED, output[-2000:])]
            return [_case(case) for case in ElementTree.parse(report).iter("testcase")]

    return run


TORCH_DDP = """
from torch.testing._internal.distributed import distributed_test as theirs

class TestTorch(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""
DDP_TESTS = (
    "ddp or DistributedDataParallel or static_graph or grads_same_across or output_unused or undefined_grad or "
    "post_localSGD or get_data_parallel or sync_bn or detect_ddp or verify_model"
)


def torch_ddp(_: Path, env: dict[str, str], limit_s: float) -> list[tuple[str, str, str]]:
    """Runs the tests of DistributedDataParallel in the installed torch, each in 2 processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_torch.py").write_text(TORCH_DDP)
        env = {**env, "BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": folder, GPUS: "2"}
        env["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = "60"
        only = os.environ.get("OUTSIDE_SUITES_ONLY", DDP_TESTS)
        return files("test_torch.py", "-k", only)(Path(folder), env, limit_s)


FSDP_TESTS = ("autograd", "clip_grad_norm_", "extensions", "frozen", "state", "state_dict")


def torch_fsdp(checkout: Path, env: dict[str, str], limit_s: float) -> list[tuple[str, str, str]]:
    """Runs the tests of FSDP2, each in 2 processes of its own."""
    names = [f"test/distributed/fsdp2/test_fully_shard_{name}.py" for name in FSDP_TESTS]
    names.append("test/distributed/_composable/fsdp/test_fully_shard_training.py")
    env = {**env, GPUS: "2", REFERENCE: "torch", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60"}
    return files(*names)(checkout, env, limit_s)


LIGHTNING_TESTS = {
    "fabric": (
        *("strategies/test_ddp", "strategies/test_ddp_integration", "plugins/collectives/test_torch_collective"),
        *("strategies/launchers/test_multiprocessing_integration", "utilities/test_distributed"),
    ),
    "pytorch": (
        *("strategies/test_ddp", "strategies/test_ddp_integration", "strategies/test_ddp_integration_comm_hook"),
        *("strategies/test_common", "overrides/test_distributed", "utilities/test_all_gather_grad"),
        *("core/test_metric_result_integration", "callbacks/test_weight_averaging", "checkpointing/test_torch_saving"),
        *("models/test_cpu", "models/test_hooks", "loops/test_prediction_loop"),
        *("trainer/logging_/test_distributed_logging", "trainer/logging_/test_train_loop_logging"),
        "trainer/optimization/test_manual_optimization",
    ),
}
IN_PROCESSES = "ddp or spawn or fork or distributed or gather or collective or processes or strategy or sync"


def lightning(checkout: Path, env: dict[str, str], limit_s: float) -> list[tuple[str, str, str]]:
    """Runs the tests of Fabric and of the Trainer that start processes, and those of the strategy "ddp"; then the
    tests that Lightning keeps separate and that a CPU can run."""
    paths = [f"tests_{part}/{name}.py" for part, names in LIGHTNING_TESTS.items() for name in names]
    options = ("--rootdir=.", "-o", "markers=flaky: of a package that repeats tests", "-k")
    found = files(*paths, *options, IN_PROCESSES)(checkout / "tests", env, limit_s)
    apart = files("tests_fabric/strategies/test_ddp_integration.py", *options, "clip_gradients and cpu")
    alone = apart(checkout / "tests", {**env, "PL_RUN_STANDALONE_TESTS": "1"}, limit_s)
    names = {name for name, *_ in alone}
    return [each for each in found if each[0] not in names] + alone


def _case(case: ElementTree.Element) -> tuple[str, str, str]:
    name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name')}"
    for child in case:
        if child.tag in ("failure", "error"):
            return name, FAILED, f"{child.get('message', '')}\n{child.text or ''}"
        if child.tag == "skipped":
            return name, SKIPPED, child.get("message", "")
    return name, PASSED, ""


def _started(command: list[str], env: dict[str, str], limit_s: float, folder: Path) -> tuple[int, str]:
    """Runs a command; returns its exit status and output. The command and all its children are ended after
    ``limit_s``."""
    process = subprocess.Popen(
        command,
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
    return process.returncode, output


SUITES = {
    "accelerate": Suite(
        "accelerate's scripts",
        lambda _: f"accelerate {importlib.metadata.version('accelerate')}",
        ("backend", "api"),
        scripts,
    ),
    "torch-ddp": Suite(
        "torch's DistributedTest, those of DDP",
        lambda _: f"torch {importlib.metadata.version('torch')}",
        ("backend", "api"),
        torch_ddp,
    ),
    "torch-fsdp": Suite(
        "torch's tests of FSDP2, as Ascend/pytorch has them",
        lambda checkout: f"commit {_commit(checkout)}",
        ("backend", "api"),
        torch_fsdp,
    ),
    "lightning": Suite(
        "Lightning's tests of DDP and its collectives, Fabric and Trainer",
        lambda checkout: f"lightning {importlib.metadata.version('lightning')}, tests of commit {_commit(checkout)}",
        ("backend", "api"),
        lightning,
    ),
    "cs336": Suite(
        "Stanford CS336, assignment 2",
        lambda checkout: f"commit {_commit(checkout)}",
        ("api",),
        files("tests/test_ddp.py", "tests/test_fsdp.py", "tests/test_sharded_optimizer.py"),
    ),
}


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


START = """
import os, sys, traceback
if not any("resource_tracker" in each for each in sys.orig_argv):
    try:
        import outside_suites
        outside_suites.adapt()
    except BaseException:
        traceback.print_exc()
        os._exit(3)
"""  # sitecustomize.py, which Python imports first in every process


def outcomes(name: str, checkout: Path, way: str, limit_s: float) -> list[Outcome]:
    """Runs a suite in one of its ways."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(START)
        path = os.pathsep.join([folder, str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", WAY: way}
        for test, verdict, told in SUITES[name].run(checkout, env, limit_s):
            found.append(Outcome(name, way, test, verdict, told[-6000:]))
            print(name, way, test, verdict, told[-1500:] if verdict == FAILED else told[:100], flush=True)
    return found


# ---- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The reason why tests fail: they access something that cannot be replaced, or a cause given as a sentence."""

    suite: str
    test: str  # a regular expression for the name or the end of the output
    reason: str
    applies: bool = False
    way: str = ""

    def covers(self, outcome: Outcome) -> bool:
        """Whether this verdict applies to an outcome."""
        named = re.search(self.test, outcome.name) or re.search(self.test, _cause(outcome.told))
        return outcome.suite == self.suite and self.way in ("", outcome.way) and bool(named)


VERDICTS = [
    Verdict("cs336", r"gradient_sync", "asks for a wrapper with `.module`; fully_shard gives the module itself"),
    Verdict(
        "torch-ddp",
        r"no attribute '_get_active_ddp_module'",
        "fails under this adapter, which replaces the constructor; torch.compile of the wrapper works without it",
        way="api",
    ),
    # ---- not applicable -------------------------------------------------------------------------------------------
    Verdict("accelerate", r"BF16 all reduce communication hook", "torch's wrapper takes this hook over NCCL alone"),
    Verdict(
        "cs336",
        r"test_fsdp_correctness\[fp32",
        "asks for the bits of one process with both ranks' data in one batch, whose sums have another order",
    ),
    Verdict("torch-ddp", r"SyncBatchNorm (layers|expected)", "torch's SyncBatchNorm takes GPU tensors alone"),
    Verdict(
        "torch-ddp",
        r"Cannot access accelerator device|doesn't support events|None is not 1",
        "needs a GPU, not only its name",
    ),
    Verdict(
        "torch-ddp",
        r"ddp_logging_data|sync_bn_logged|comm_hook_logging|python_error_logged|profiling",
        "reads the log, or the profile, of torch's own reducer",
    ),
    Verdict(
        "torch-ddp",
        r"ddp_uneven_inputs$",
        "does not end in its time, over Gloo neither: after 55 s both had come to its 7th case",
        way="backend",
    ),
    Verdict(
        "torch-ddp",
        r"ddp_uneven_inputs$|no attribute '_|control_flow|broadcast_bucket_size",
        "uses private methods and attributes of torch's wrapper",
        way="api",
    ),
    Verdict(
        "torch-ddp",
        r"nested_unused_params_err|unused_params_rebuild|invalid_static_graph|static_graph_api_cpu",
        "expects an error about unused parameters or a static graph, which ringcomm allows",
        way="api",
    ),
    Verdict(
        "torch-ddp",
        r"deprecation_warning|device_mesh_initialization",
        "expects torch's text of a warning or an error",
        way="api",
    ),
    Verdict("torch-fsdp", r"hsdp_tp|clip_grad_norm_2d$", "needs 4 or 8 ranks", way="backend"),
    Verdict(
        "torch-fsdp",
        r"device string: npu|Cannot access accelerator device",
        "needs the device itself, not only its name",
        way="backend",
    ),
    Verdict("torch-fsdp", r"share_comm_context", "was written for another version of torch", way="backend"),
    Verdict("torch-fsdp", r"hsdp_tp|_2d|dp_tp", "needs 4 or 8 ranks, or torch's tensor parallel beside it", way="api"),
    Verdict(
        "torch-fsdp",
        r"clip_grad_norm_1d|cpu_offload|save_load|rank0_offload|requires_grad_per_group|extensions|fully_shard_cls|fully_shard_state$|share_comm",
        "looks into DTensors, or into torch's own state of a module",
        way="api",
    ),
    Verdict(
        "torch-fsdp", r"requires_grad_across", "counts the calls of an autograd function of torch's own", way="api"
    ),
    # ---- failures and their causes --------------------------------------------------------------------------------
    Verdict(
        "torch-ddp",
        r"apply_optim_in_backward",
        "An optimizer that steps during backward is refused by name.",
        True,
        "api",
    ),
    Verdict("torch-ddp", r"bucket_cap_mb_list", "`bucket_cap_mb_list` is refused by name.", True, "api"),
    Verdict(
        "torch-ddp",
        r"ignore_params_arg",
        "It replaces ignored parameters after wrapping; new parameters are refused then, ignored ones too.",
        True,
        "api",
    ),
    Verdict(
        "torch-ddp",
        r"nested_types",
        "It wraps a wrapper, which is refused: gradients would be averaged twice.",
        True,
        "api",
    ),
    Verdict(
        "torch-ddp",
        r"uneven_inputs_stop_iteration",
        "A SyncBatchNorm inside of `join` is refused, also with `throw_on_early_termination`.",
        True,
        "api",
    ),
    Verdict(
        "torch-fsdp",
        r"post_acc_grad_hook_optim",
        "A hook on a parameter sees this rank's own gradient, so an optimizer's step there is refused.",
        True,
        "api",
    ),
    Verdict("torch-fsdp", r"deepcopy", "A copy of a module in shards is refused by name.", True, "api"),
    Verdict(
        "torch-fsdp", r"reapply", "A second call is refused, as in torch, with another class of error.", True, "api"
    ),
    Verdict(
        "torch-fsdp",
        r"unsupported_module",
        "torch refuses a ModuleList, which has no forward; here it is a unit of what it holds.",
        True,
        "api",
    ),
]


def table(kept: dict[str, list[Outcome]], versions: dict[str, str]) -> str:
    """Returns all outcomes as Markdown."""
    rows, notes = [], []
    for key, found in kept.items():
        name, way = key.split()
        verdicts = {one: next((each for each in VERDICTS if each.covers(one)), None) for one in found}
        passed = [one for one in found if one.verdict == PASSED]
        failed = [one for one in found if one.verdict == FAILED and (verdicts[one] is None or verdicts[one].applies)]
        groups: dict[str, list[str]] = defaultdict(list)
        for one in found:
            if one.verdict == SKIPPED:
                groups[f"the suite skips it: {one.told.splitlines()[0] if one.told else 'no reason given'}"].append(
                    one.name
                )
            elif one.verdict == FAILED and one not in failed:
                groups[verdicts[one].reason].append(one.name)
        counts = [len(found), len(passed), len(found) - len(passed) - len(failed), len(failed)]
        rows.append(f"| {SUITES[name].title} | {versions[name]} | {way} | {' | '.join(map(str, counts))} |")
        notes += ["", f"## {SUITES[name].title}: {way}", ""]
        notes += [
            f"* Failed: `{one.name}`. {verdicts[one].reason if verdicts[one] else _cause(one.told)}" for one in failed
        ]
        notes += [
            f"* Not applicable, {len(names)}: {reason} ({', '.join(f'`{each}`' for each in sorted(names))})."
            for reason, names in sorted(groups.items())
        ]
        if notes[-1] == "":
            notes.append("Every test passed.")
    missing = [
        f"{suite.title} ({way})" for name, suite in SUITES.items() for way in suite.ways if f"{name} {way}" not in kept
    ]
    head = [
        *HEAD,
        "",
        "| suite | version | way | tests | passed | not applicable | failed |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    rest = ["", f"Not run: {', '.join(missing)}."] if missing else []
    return "\n".join([*head, *rows, *rest, *map(_wrapped, notes), ""])


def _wrapped(note: str) -> str:
    """Wraps a line of the page to at most 120 columns."""
    return textwrap.fill(note, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _cause(told: str) -> str:
    lines = [line.removeprefix("E").strip() for line in told.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    errors = [line for line in errors if not line.startswith("RuntimeError: Process")] or errors
    return (errors or lines or ["?"])[-1]


HEAD = [
    "# Other projects' tests over ringcomm",
    "",
    "Unmodified tests, on CPUs, 2 ranks; made by `benchmarks/training/outside_suites.py`, which says what it replaces.",
    'In the way `backend` torch\'s own classes run over the backend "ringcomm"; in the way `api`',
    "ringcomm.DistributedDataParallel and ringcomm.fully_shard also stand in the place of torch's.",
    "",
    "Not run: tests in torch's repository that its package does not hold (the tests of FSDP2 are those that",
    "Ascend/pytorch has made of them); those of Lightning's tests that share no process group.",
    "",
    "The GPU that a test asks for is replaced by the CPU.",
]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("suites", nargs="*", metavar="NAME[=CHECKOUT]", help=", ".join(SUITES))
    p.add_argument("--keep", type=Path, help="a file of JSON in which the outcomes of several calls are put together")
    p.add_argument("--way", help="this one alone")
    p.add_argument("--write", action="store_true", help=f"into results/{RESULT.name}")
    p.add_argument("--limit", type=float, default=1200.0, help="seconds for each suite and way")
    p.add_argument("--script", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.script:
        run_script(a.script)
        return
    kept: dict[str, list[Outcome]] = {}
    versions: dict[str, str] = {}
    if a.keep and a.keep.exists():
        before = json.loads(a.keep.read_text())
        versions = before["versions"]
        kept = {key: [Outcome(*each) for each in found] for key, found in before["outcomes"].items()}
    for each in a.suites:
        name, _, place = each.partition("=")
        checkout = Path(place or ".").resolve()
        versions[name] = SUITES[name].version(checkout)
        for way in [a.way] if a.way else SUITES[name].ways:
            kept[f"{name} {way}"] = outcomes(name, checkout, way, a.limit)
            if a.keep:
                plain = {key: [list(vars(one).values()) for one in found] for key, found in kept.items()}
                a.keep.write_text(json.dumps({"versions": versions, "outcomes": plain}, indent=1))
    if a.write:
        RESULT.write_text(table(kept, versions))


if __name__ == "__main__":
    main()
