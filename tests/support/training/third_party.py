"""Programs of other people: unmodified models and the loops that people write around them, on ranks, at any stage.

A program is a function of a `Run`, which wraps its models (torch's DDP over the backend "ringcomm", or `ringcomm.shard`
at one stage) and keeps what is compared: every loss, every parameter and buffer at the end. All its choices (the
model's sizes, dropout, accumulation, clipping, checkpointing, the optimizer) are drawn from one seed, so that every
rank and every stage runs the same program.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import ringcomm
from ringcomm.errors import AbortedError, UnsupportedError
from tests.support import torch_ranks

WORLD_SIZE = 3
STEPS = 3
DDP = "DDP"  # torch's
WAYS: tuple[str | int, ...] = (DDP, 0, 1, 2, 3)
Values = dict[str, torch.Tensor]


# ---- one run of a program ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """How one rank runs a program: what wraps its models, and what is kept to be compared."""

    way: str | int  # DDP, or the stage
    rng: random.Random
    seed: int
    values: Values = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return dist.get_rank()

    def wrap(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None, unused: bool = False
    ) -> nn.Module:
        """Wraps a model, and its optimizer if there is one already.

        Args:
            unused: whether some passes leave parameters without a gradient, which torch's DDP must be told.
        """
        if self.way == DDP:
            model = nn.parallel.DistributedDataParallel(module, find_unused_parameters=unused)
            return ringcomm.hooks.attach(model)
        model, _ = ringcomm.shard(module, optimizer, int(self.way))
        return model

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Backward passes inside add up on this rank alone."""
        return model.no_sync() if self.way == DDP else ringcomm.no_sync(model)

    def unsharded(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Every parameter can be read inside, and buffers are rank 0's."""
        if self.way != DDP:
            return ringcomm.whole(model)
        for x in model.buffers():
            dist.broadcast(x.data, 0)
        return contextlib.nullcontext()

    def clip(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clips by the norm, whose bits do not depend on the order of the sum."""
        if self.way != DDP:
            return ringcomm.clip_grad_norm_(model, max_norm)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().float()
        for g in gradients:
            g.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def own_random_numbers(self) -> None:
        """From here on every rank has other dropout than the rest."""
        torch.manual_seed(100 * self.seed + self.rank)

    def generator(self, step: int) -> torch.Generator:
        """Draws this rank's batch of a step."""
        return torch.Generator().manual_seed(1009 * self.seed + 101 * step + self.rank)

    def keep(self, name: str, x: torch.Tensor) -> None:
        """Keeps a value that every way must agree on."""
        self.values[f"{name} #{sum(each.startswith(f'{name} #') for each in self.values)}"] = x.detach().clone()

    def keep_state(self, name: str, module: nn.Module) -> None:
        """Keeps the parameters and buffers of an unwrapped model; a collective."""
        for key, x in module.state_dict().items():
            self.values[f"{name}.{key}"] = x.detach().clone()


Main = Callable[[Run], None]


@dataclass(frozen=True)
class Program:
    """A program under its name, and the package that its model or optimizer comes from."""

    name: str
    package: str
    main: Main
    may_refuse: bool = False  # an optimizer with a sum over all parameters is right, or refused, from stage 1 on


@dataclass
class Outcome:
    """What a rank has at the end of a run: values, or an exception."""

    values: Values
    error: str = ""
    refused: bool = False  # by a sentence of ours
    consequence: bool = False  # of another rank's exception


def execute(name: str, seed: int, way: str | int) -> Outcome:
    """Runs a program on this rank, over the default process group."""
    program = PROGRAMS[name]
    run = Run(way, random.Random(f"{name} {seed}"), seed)
    torch.manual_seed(seed)
    os.environ.update(TRANSFORMERS_VERBOSITY="error", DIFFUSERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(None):
            program.main(run)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        return Outcome({}, told, isinstance(error, UnsupportedError), isinstance(error, AbortedError))
    return Outcome(run.values)


def outcomes_of(name: str, seed: int, way: str | int) -> list[Outcome]:
    """Runs a program on processes; what every rank has at the end."""
    return torch_ranks.run(execute, name, seed, way, world_size=WORLD_SIZE, timeout_s=100)


def error_of(outcomes: list[Outcome]) -> str:
    """The exception that came first, if any rank has one."""
    failed = sorted((o.consequence, rank, o.error) for rank, o in enumerate(outcomes) if o.error)
    return f"rank {failed[0][1]}: {failed[0][2]}" if failed else ""


def differing(expected: Outcome, found: Outcome) -> list[str]:
    """The names of values that are not the same bits."""
    names = [*expected.values, *(name for name in found.values if name not in expected.values)]
    return [name for name in names if not same_bits(expected.values.get(name), found.values.get(name))]


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors have the same type, shape and bytes; a NaN is equal to itself, and 0 is not -0."""
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def difference_of(expected: list[Outcome], found: list[Outcome]) -> str:
    """The first value that is not the same bits on some rank, with how far apart it is; empty if there is none."""
    for rank, (a, b) in enumerate(zip(expected, found, strict=True)):
        names = differing(a, b)
        if names:
            x, y = a.values.get(names[0]), b.values.get(names[0])
            comparable = x is not None and y is not None and x.shape == y.shape
            far = f", by {float((x.double() - y.double()).abs().max()):.1e}" if comparable else ""
            return f"rank {rank}: {len(names)} of {len(a.values)} values differ, first {names[0]}{far}"
    return ""


def verdicts(name: str, seed: int) -> dict[str | int, str]:
    """For each way "equal" (to torch's DDP), "refused: ...", or what went wrong."""
    found: dict[str | int, str] = {}
    expected: list[Outcome] | None = None  # of the first way that ran
    for way in WAYS:
        outcomes = outcomes_of(name, seed, way)
        error = error_of(outcomes)
        if error:
            refused = PROGRAMS[name].may_refuse and all(o.refused for o in outcomes) and way not in (DDP, 0)
            found[way] = f"refused: {error}" if refused else error
            continue
        expected = expected or outcomes
        found[way] = difference_of(expected, outcomes) or "equal"
    return found


# ---- models ------------------------------------------------------------------------------------------------------

Batch = dict[str, torch.Tensor]


def loss_by_itself(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that a model of transformers computes when it gets labels."""
    return model(**batch).loss


@dataclass
class Task:
    """A model, its batches, its loss."""

    module: nn.Module
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor] = loss_by_itself
    unused: bool = False  # whether some parameters get no gradient
    writes: bool = False  # whether `generate` makes text


TaskOf = Callable[[random.Random], Task]


def transformers_model(kind: str, config_kind: str, **options: Any) -> nn.Module:
    """A model of Hugging Face transformers with random weights."""
    transformers = importlib.import_module("transformers")
    return getattr(transformers, kind)(getattr(transformers, config_kind)(**options))


def token_batches(rng: random.Random, vocabulary: int, *names: str, labels: str = "labels") -> Any:
    """Batches of tokens under these names, of a size that the seed chooses, and a label for each token."""
    rows, length = rng.randint(1, 3), rng.randint(3, 7)

    def batch(generator: torch.Generator) -> Batch:
        drawn = {name: torch.randint(2, vocabulary, (rows, length), generator=generator) for name in names}
        return {**drawn, labels: torch.randint(2, vocabulary, (rows, length), generator=generator)}

    return batch


def image_batches(rng: random.Random, size: int, classes: int = 5) -> Callable[[torch.Generator], Batch]:
    """Batches of images and a class for each."""
    rows = rng.randint(2, 4)

    def batch(generator: torch.Generator) -> Batch:
        images = torch.randn(rows, 3, size, size, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(classes, (rows,), generator=generator)}

    return batch


def sizes(rng: random.Random) -> tuple[int, int, int]:
    """Width, heads, layers."""
    heads = rng.choice([2, 4])
    return 8 * rng.randint(2, 4), heads, rng.randint(2, 3)


def dropout(rng: random.Random) -> float:
    """A probability."""
    return rng.choice([0.0, 0.1])


def t5(rng: random.Random) -> Task:
    width, heads, layers = sizes(rng)
    model = transformers_model(
        "T5ForConditionalGeneration", "T5Config", vocab_size=41, d_model=width, d_kv=8, d_ff=2 * width + 3,
        num_layers=layers, num_decoder_layers=layers, num_heads=heads, dropout_rate=dropout(rng),
        feed_forward_proj=rng.choice(["relu", "gated-gelu"]), tie_word_embeddings=rng.random() < 0.5,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Task(model, token_batches(rng, 41, "input_ids"), writes=True)


def bart(rng: random.Random) -> Task:
    width, heads, layers = sizes(rng)
    model = transformers_model(
        "BartForConditionalGeneration", "BartConfig", vocab_size=41, d_model=width, encoder_layers=layers,
        decoder_layers=rng.randint(2, 3), encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=2 * width, decoder_ffn_dim=2 * width + 1, max_position_embeddings=16, dropout=dropout(rng),
        scale_embedding=rng.random() < 0.5, decoder_layerdrop=0.0,
    )  # fmt: skip
    return Task(model, token_batches(rng, 41, "input_ids"), writes=True)


def whisper(rng: random.Random) -> Task:
    width, heads, layers = sizes(rng)
    frames = 2 * rng.randint(4, 6)
    model = transformers_model(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=41, num_mel_bins=6, d_model=width,
        encoder_layers=layers, decoder_layers=rng.randint(2, 3), encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=2 * width, decoder_ffn_dim=2 * width + 1,
        max_source_positions=frames // 2, max_target_positions=12, dropout=dropout(rng), pad_token_id=0,
        bos_token_id=1, eos_token_id=1, decoder_start_token_id=0, begin_suppress_tokens=None,
    )  # fmt: skip
    rows = rng.randint(1, 3)

    def batch(generator: torch.Generator) -> Batch:
        features = torch.randn(rows, 6, frames, generator=generator)
        return {"input_features": features, "labels": torch.randint(2, 41, (rows, 5), generator=generator)}

    return Task(model, batch)


def bert(rng: random.Random) -> Task:
    width, heads, layers = sizes(rng)
    kind, labels = rng.choice(
        [("BertForMaskedLM", "labels"), ("BertForPreTraining", "labels"), ("BertForQuestionAnswering", "")]
    )
    model = transformers_model(
        kind, "BertConfig", vocab_size=41, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=2 * width + 1, max_position_embeddings=16, hidden_dropout_prob=dropout(rng),
        tie_word_embeddings=rng.random() < 0.7,
    )  # fmt: skip
    tokens, rows = token_batches(rng, 41, "input_ids"), rng.randint(1, 3)

    def batch(generator: torch.Generator) -> Batch:
        if labels:
            found = tokens(generator)
            more = torch.randint(2, (len(found["labels"]),), generator=generator)
            return found if kind == "BertForMaskedLM" else {**found, "next_sentence_label": more}
        ends = torch.randint(6, (2, rows), generator=generator)
        ids = torch.randint(41, (rows, 6), generator=generator)
        return {"input_ids": ids, "start_positions": ends[0], "end_positions": ends[1]}

    return Task(model, batch, unused=True)  # the bias of a decoder that is not tied


def gpt2(rng: random.Random) -> Task:
    width, heads, layers = sizes(rng)
    p = dropout(rng)
    model = transformers_model(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=41, n_positions=16, n_embd=width, n_layer=layers, n_head=heads,
        resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, bos_token_id=0, eos_token_id=0,
        scale_attn_by_inverse_layer_idx=rng.random() < 0.5,
    )  # fmt: skip
    return Task(model, token_batches(rng, 41, "input_ids"), writes=True)


def llama(rng: random.Random) -> Task:
    width, heads, layers = sizes(rng)
    model = transformers_model(
        "LlamaForCausalLM", "LlamaConfig", vocab_size=41, hidden_size=width, intermediate_size=2 * width + 1,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=rng.choice([1, heads]),
        max_position_embeddings=16, tie_word_embeddings=rng.random() < 0.5, attention_bias=rng.random() < 0.5,
    )  # fmt: skip
    return Task(model, token_batches(rng, 41, "input_ids"), writes=True)


def mixtral(rng: random.Random) -> Task:
    width, heads, layers = sizes(rng)
    model = transformers_model(
        "MixtralForCausalLM", "MixtralConfig", vocab_size=41, hidden_size=width, intermediate_size=width + 8,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=2, max_position_embeddings=16,
        num_local_experts=rng.randint(3, 5), num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1, experts_implementation=rng.choice(["eager", "grouped_mm", "batched_mm"]),
    )  # fmt: skip
    return Task(model, token_batches(rng, 41, "input_ids"), writes=True)


def vit(rng: random.Random) -> Task:
    width, heads, layers = sizes(rng)
    model = transformers_model(
        "ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4, hidden_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=2 * width + 1, num_labels=5,
        hidden_dropout_prob=dropout(rng), qkv_bias=rng.random() < 0.5,
    )  # fmt: skip
    return Task(model, image_batches(rng, 8))


def clip(rng: random.Random) -> Task:
    width, heads, layers = sizes(rng)
    transformers = importlib.import_module("transformers")
    tower = {"hidden_size": width, "intermediate_size": width + 1, "num_attention_heads": heads}
    text = {**tower, "vocab_size": 41, "num_hidden_layers": layers, "max_position_embeddings": 8}
    text |= {"bos_token_id": 39, "eos_token_id": 40, "pad_token_id": 0}
    vision = {**tower, "num_hidden_layers": rng.randint(2, 3), "image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    images, rows = image_batches(rng, 8), rng.randint(2, 4)

    def batch(generator: torch.Generator) -> Batch:
        pixels = images(generator)["pixel_values"][:1].repeat(rows, 1, 1, 1)
        pixels = pixels + torch.randn(pixels.shape, generator=generator)
        return {"input_ids": torch.randint(41, (rows, 6), generator=generator), "pixel_values": pixels}

    return Task(transformers.CLIPModel(config), batch, lambda model, inputs: model(**inputs, return_loss=True).loss)


def resnet(rng: random.Random) -> Task:
    kind = rng.choice(["basic", "bottleneck"])
    model = transformers_model(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], num_labels=5,
        depths=[rng.randint(1, 2), 2], layer_type=kind, downsample_in_first_stage=rng.random() < 0.5,
    )  # fmt: skip
    return Task(model, image_batches(rng, 16))


class DenseLayer(nn.Sequential):
    """A layer of DenseNet: it gets the list of all features before, as in torchvision's."""

    def __init__(self, width: int, growth: int, p: float, recompute: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, 2 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(2 * growth), nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)
        self.p, self.recompute = p, recompute

    def bottleneck(self, *features: torch.Tensor) -> torch.Tensor:
        return self.conv1(F.relu(self.norm1(torch.cat(features, 1)), inplace=True))

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        if self.recompute:
            x = torch.utils.checkpoint.checkpoint(self.bottleneck, *features, use_reentrant=False)
        else:
            x = self.bottleneck(*features)
        x = self.conv2(F.relu(self.norm2(x), inplace=True))
        return F.dropout(x, self.p, self.training) if self.p else x


class DenseBlock(nn.ModuleDict):
    """A block of DenseNet: a list that grows by what each layer gives."""

    def __init__(self, layers: int, width: int, growth: int, p: float, recompute: bool) -> None:
        super().__init__()
        for i in range(layers):
            self[f"layer{i}"] = DenseLayer(width + i * growth, growth, p, recompute)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        features = [first]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet(rng: random.Random) -> Task:
    growth, width, p, recompute = rng.randint(3, 5), 8, dropout(rng), rng.random() < 0.5
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)]
    for number, layers in enumerate([2, rng.randint(2, 3)]):
        parts.append(DenseBlock(layers, width, growth, p, recompute))
        width += layers * growth
        if number == 0:
            parts += [
                nn.BatchNorm2d(width),
                nn.ReLU(True),
                nn.Conv2d(width, width // 2, 1, bias=False),
                nn.AvgPool2d(2),
            ]
            width //= 2
    model = nn.Sequential(
        *parts, nn.BatchNorm2d(width), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5)
    )
    return Task(model, image_batches(rng, 8), classes_loss)


def classes_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The cross entropy of a plain classifier."""
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def unet(rng: random.Random) -> Task:
    diffusers = importlib.import_module("diffusers")
    first = rng.choice([8, 16])
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(first, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4, dropout=dropout(rng),
    )  # fmt: skip

    def batch(generator: torch.Generator) -> Batch:
        noise, images = torch.randn(2, 2, 3, 8, 8, generator=generator)
        return {"noise": noise, "images": images, "times": torch.randint(1000, (2,), generator=generator)}

    scheduler = diffusers.DDPMScheduler()
    return Task(model, batch, lambda net, inputs: diffusion_loss(net, inputs, scheduler))


def diffusion_loss(net: nn.Module, batch: Batch, scheduler: Any, *condition: torch.Tensor) -> torch.Tensor:
    """How far a network's guess of the noise is from the noise."""
    noised = scheduler.add_noise(batch["images"], batch["noise"], batch["times"])
    return F.mse_loss(net(noised, batch["times"], *condition).sample, batch["noise"])


def conditional_unet(rng: random.Random) -> Task:
    diffusers = importlib.import_module("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=4, cross_attention_dim=12,
        block_out_channels=(8, 16), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=rng.choice([2, 4]),
    )  # fmt: skip

    def batch(generator: torch.Generator) -> Batch:
        noise, images = torch.randn(2, 2, 4, 8, 8, generator=generator)
        times, text = torch.randint(1000, (2,), generator=generator), torch.randn(2, 5, 12, generator=generator)
        return {"noise": noise, "images": images, "times": times, "text": text}

    scheduler = diffusers.DDPMScheduler()
    return Task(model, batch, lambda net, inputs: diffusion_loss(net, inputs, scheduler, inputs["text"]))


# ---- the loop that most people write -----------------------------------------------------------------------------


def enable_checkpointing(module: nn.Module, use_reentrant: bool = False) -> None:
    """Turns on activation checkpointing as the model's package does."""
    options = {"use_reentrant": use_reentrant}
    if not getattr(module, "supports_gradient_checkpointing", True):
        return
    if hasattr(module, "activation_checkpointing_enable"):
        module.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    elif hasattr(module, "gradient_checkpointing_enable"):  # its name before
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    elif hasattr(module, "enable_gradient_checkpointing"):
        module.enable_gradient_checkpointing()


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices alone."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(rng: random.Random, module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of torch, in most cases with two groups."""
    groups = parameter_groups(module) if rng.random() < 0.7 else list(module.parameters())
    kind = rng.choice(["AdamW", "AdamW", "Adam", "SGD", "NAdam", "RMSprop"])
    if kind == "SGD":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=rng.random() < 0.5)
    return getattr(torch.optim, kind)(groups, lr=0.01)


@dataclass(frozen=True)
class Habits:
    """What a loop does besides the plain step, drawn from the seed."""

    accumulate: int
    clips: bool
    autocast: bool
    optimizer_first: bool

    @classmethod
    def of(cls, rng: random.Random) -> Habits:
        return cls(rng.choice([1, 2, 3]), rng.random() < 0.5, rng.random() < 0.2, rng.random() < 0.7)


def backward_passes(run: Run, model: nn.Module, task: Task, habits: Habits, step: int) -> None:
    """The passes of one step; those before the last one are kept from the wire."""
    for k in range(habits.accumulate):
        batch = task.batch(run.generator(10 * step + k))
        with run.no_sync(model) if k < habits.accumulate - 1 else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=habits.autocast):
                loss = task.loss(model, batch) / habits.accumulate
            loss.backward()
        run.keep("loss", loss)


def finetune(task_of: TaskOf) -> Main:
    """A program that trains a model as most people do."""

    def main(run: Run) -> None:
        task, habits = task_of(run.rng), Habits.of(run.rng)
        if run.rng.random() < 0.5:  # torch's DDP cannot look for unused parameters through reentrant checkpointing
            enable_checkpointing(task.module, use_reentrant=run.rng.random() < 0.4 and not task.unused)
        optimizer = make_optimizer(run.rng, task.module) if habits.optimizer_first else None
        model = run.wrap(task.module, optimizer, task.unused)
        optimizer = optimizer or make_optimizer(run.rng, model)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / STEPS)
        run.own_random_numbers()
        model.train()
        for step in range(STEPS):
            backward_passes(run, model, task, habits, step)
            if habits.clips:
                run.keep("norm", run.clip(model, 0.5))
            optimizer.step()
            warmup.step()
            optimizer.zero_grad()
        finish(run, task, model)

    return main


def finish(run: Run, task: Task, model: nn.Module) -> None:
    """Evaluates a model, lets it write if it can, and keeps its state."""
    model.eval()
    batch = task.batch(run.generator(99))
    with torch.no_grad():
        run.keep("evaluation", task.loss(model, batch))
    if task.writes and getattr(task.module, "can_generate", lambda: True)():
        prompt = next(iter(batch.values()))
        run.keep("text", task.module.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False))
    run.keep_state("model", task.module)
    if hasattr(task.module, "save_pretrained"):
        with tempfile.TemporaryDirectory() as folder:
            task.module.save_pretrained(folder)
            for path in sorted(Path(folder).glob("*.safetensors")):
                for key, x in importlib.import_module("safetensors.torch").load_file(path).items():
                    run.values[f"{path.name} {key}"] = x


# ---- optimizers of others ----------------------------------------------------------------------------------------


def some_task(rng: random.Random) -> Task:
    """One of the quick models."""
    return rng.choice([gpt2, llama, vit, bert, densenet])(rng)


class SAM(torch.optim.Optimizer):
    """Sharpness aware minimisation (Foret et al., 2020) in its usual form: climb, compute gradients again, go back and
    step."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self) -> torch.Tensor:
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack(norms), p=2)


def sam(run: Run) -> None:
    task = some_task(run.rng)
    base = run.rng.choice([torch.optim.SGD, torch.optim.AdamW])
    optimizer = SAM(task.module.parameters(), base, lr=0.01)
    model = run.wrap(task.module, optimizer, task.unused)
    run.own_random_numbers()
    for step in range(STEPS):
        batch = task.batch(run.generator(step))
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        again = task.loss(model, batch)
        again.backward()
        optimizer.second_step(zero_grad=True)
        run.keep("loss", loss)
        run.keep("loss after the climb", again)
    finish(run, task, model)


class Lookahead(torch.optim.Optimizer):
    """Slow weights that go a part of the way every k steps (Zhang et al., 2019), around another optimizer."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if "slow" not in self.state[p]:
                    self.state[p]["slow"] = p.detach().clone()
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.add_(p.data - slow, alpha=self.alpha)
                    p.data.copy_(slow)
        return loss


class LookaheadOutside:
    """The same as a plain object, which writes into the parameters after the step."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in base.param_groups]

    def zero_grad(self) -> None:
        self.base.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.base.param_groups, self.slow, strict=True):
                for p, s in zip(group["params"], slow, strict=True):
                    s.add_(p.detach() - s, alpha=self.alpha)
                    p.copy_(s)


def plain_steps(run: Run, task: Task, model: nn.Module, optimizer: Any) -> None:
    """The shortest loop, for what only the optimizer makes special."""
    habits = Habits.of(run.rng)
    run.own_random_numbers()
    for step in range(STEPS + 1):
        backward_passes(run, model, task, habits, step)
        optimizer.step()
        optimizer.zero_grad()


def lookahead(run: Run) -> None:
    task = some_task(run.rng)
    optimizer = Lookahead(torch.optim.Adam(task.module.parameters(), lr=0.01))
    model = run.wrap(task.module, optimizer, task.unused)
    plain_steps(run, task, model, optimizer)
    finish(run, task, model)


def lookahead_outside(run: Run) -> None:
    task = some_task(run.rng)
    optimizer = torch.optim.Adam(task.module.parameters(), lr=0.01)
    model = run.wrap(task.module, optimizer, task.unused)
    with run.unsharded(model):
        outside = LookaheadOutside(optimizer)
    plain_steps(run, task, model, outside)
    finish(run, task, model)


def lion(run: Run) -> None:
    task = some_task(run.rng)
    kind = importlib.import_module("lion_pytorch").Lion
    optimizer = kind(parameter_groups(task.module), lr=0.003, decoupled_weight_decay=run.rng.random() < 0.5)
    model = run.wrap(task.module, optimizer, task.unused)
    plain_steps(run, task, model, optimizer)
    finish(run, task, model)


def prodigy(run: Run) -> None:
    task = some_task(run.rng)
    kind = importlib.import_module("prodigyopt").Prodigy
    optimizer = kind(task.module.parameters(), weight_decay=0.1, slice_p=run.rng.choice([1, 3]), decouple=False)
    model = run.wrap(task.module, optimizer, task.unused)
    plain_steps(run, task, model, optimizer)
    finish(run, task, model)
    estimate = optimizer.param_groups[0]["d"]
    run.keep("estimate", torch.tensor(float(estimate)))


def schedule_free(run: Run) -> None:
    """Its parameters are other ones in training than in evaluation."""
    task = some_task(run.rng)
    package = importlib.import_module("schedulefree")
    kind = run.rng.choice([package.AdamWScheduleFree, package.SGDScheduleFree, package.RAdamScheduleFree])
    optimizer = kind(task.module.parameters(), lr=0.01, weight_decay=0.1, foreach=run.rng.random() < 0.5)
    model = run.wrap(task.module, optimizer, task.unused)
    for _ in range(2):
        model.train()
        optimizer.train()
        plain_steps(run, task, model, optimizer)
        optimizer.eval()
        finish(run, task, model)


def exponential_average(run: Run) -> None:
    """torch's AveragedModel, made before wrapping, is fed with the unsharded model and evaluated at the end."""
    averages = torch.optim.swa_utils
    task, habits = some_task(run.rng), Habits.of(run.rng)
    average = averages.AveragedModel(
        task.module, multi_avg_fn=averages.get_ema_multi_avg_fn(0.9), use_buffers=run.rng.random() < 0.5
    )
    optimizer = make_optimizer(run.rng, task.module)
    model = run.wrap(task.module, optimizer, task.unused)
    run.own_random_numbers()
    for step in range(STEPS):
        backward_passes(run, model, task, habits, step)
        optimizer.step()
        optimizer.zero_grad()
        with run.unsharded(model):
            average.update_parameters(task.module)
    average.eval()
    with torch.no_grad():
        run.keep("evaluation of the average", task.loss(average, task.batch(run.generator(98))))
    run.keep_state("average", average)
    finish(run, task, model)


# ---- fine-tuning of a part ---------------------------------------------------------------------------------------


def lora(run: Run) -> None:
    """Adapters of peft in a frozen model; the optimizer gets all parameters."""
    peft = importlib.import_module("peft")
    of, targets = run.rng.choice([(llama, ["q_proj", "v_proj"]), (gpt2, ["c_attn"]), (t5, ["q", "v", "wi", "wo"])])
    task, habits = of(run.rng), Habits.of(run.rng)
    if habits.autocast:
        enable_checkpointing(task.module)
        task.module.enable_input_require_grads()
    config = peft.LoraConfig(
        r=run.rng.randint(2, 4), lora_alpha=8, target_modules=targets, lora_dropout=dropout(run.rng),
        fan_in_fan_out=of is gpt2, use_dora=run.rng.random() < 0.3, bias=run.rng.choice(["none", "lora_only"]),
    )  # fmt: skip
    task.module = peft.get_peft_model(task.module, config)
    optimizer = torch.optim.AdamW(task.module.parameters(), lr=0.01)
    model = run.wrap(task.module, optimizer, task.unused)
    plain_steps(run, task, model, optimizer)
    for name, x in peft.get_peft_model_state_dict(task.module).items():
        run.keep(f"adapter {name}", x)
    finish(run, task, model)


def staged_unfreezing(run: Run) -> None:
    """The head first, then one more part in each step; the optimizer has had all parameters from the beginning."""
    task, habits = vit(run.rng), Habits.of(run.rng)
    optimizer = torch.optim.AdamW(task.module.parameters(), lr=0.01)
    if run.way != DDP:
        task.module.requires_grad_(False)
    model = run.wrap(task.module, optimizer, task.unused)
    run.own_random_numbers()
    thawed: set[nn.Parameter] = set()
    for step, part in enumerate(["classifier", "vit.layernorm", "vit"]):
        thawed |= set(task.module.get_submodule(part).parameters())
        for p in thawed:
            p.requires_grad_(True)
        backward_passes(run, model, task, habits, step)
        if run.way == DDP:  # which cannot thaw a parameter: it forgets gradients in place of that
            for p in set(task.module.parameters()) - thawed:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
    finish(run, task, model)


# ---- a language model that keeps its state from batch to batch ---------------------------------------------------


class RecurrentModel(nn.Module):
    """The word language model of torch's examples: an embedding, recurrent layers, a decoder that may be tied."""

    def __init__(self, kind: str, width: int, layers: int, p: float, tied: bool) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(p), nn.Embedding(41, width)
        self.rnn = getattr(nn, kind)(width, width, layers, dropout=p)
        self.decoder = nn.Linear(width, 41)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, 41), dim=1), hidden


def detached(hidden: Any) -> Any:
    """The hidden state without its history."""
    if hidden is None or isinstance(hidden, torch.Tensor):
        return None if hidden is None else hidden.detach()
    return tuple(each.detach() for each in hidden)


def recurrent(run: Run) -> None:
    rng = run.rng
    net = RecurrentModel(rng.choice(["LSTM", "GRU"]), 8 * rng.randint(1, 3), 2, dropout(rng), rng.random() < 0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    model, hidden = run.wrap(net, optimizer), None
    run.own_random_numbers()
    for step in range(STEPS):
        tokens = torch.randint(41, (6, 2), generator=run.generator(step))
        hidden = detached(hidden)
        output, hidden = model(tokens[:-1], hidden)
        loss = F.nll_loss(output, tokens[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        run.keep("norm", run.clip(model, 0.25))
        optimizer.step()
        run.keep("loss", loss)
    run.keep_state("model", net)


# ---- adversarial training ----------------------------------------------------------------------------------------


def set_requires_grad(models: Iterable[nn.Module], requires_grad: bool) -> None:
    """As in CycleGAN's code."""
    for model in models:
        for p in model.parameters():
            p.requires_grad = requires_grad


def gradient_penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """How far the norm of the critic's gradient is from 1 between real and fake inputs."""
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = critic(between)
    (gradient,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
    return ((gradient.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def wgan(run: Run) -> None:
    """WGAN-GP: several steps of the critic with a gradient penalty for each of the generator."""
    rng, width = run.rng, 8 * run.rng.randint(2, 4)
    freezes, wide = rng.random() < 0.5, rng.randint(1, 2)
    middle = [layer for _ in range(wide) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(True))]
    generator_net = nn.Sequential(
        nn.Linear(6, width), nn.LeakyReLU(0.2, True), *middle, nn.Linear(width, 12), nn.Tanh()
    )
    critic_net = nn.Sequential(
        nn.Linear(12, width), nn.LeakyReLU(0.2, True), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
    )
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (generator_net, critic_net)]
    generator, critic = (run.wrap(n, o) for n, o in zip((generator_net, critic_net), optimizers, strict=True))
    for step in range(2 * STEPS):
        drawn = run.generator(step)
        real, noise = torch.randn(4, 12, generator=drawn), torch.randn(4, 6, generator=drawn)
        if freezes:
            set_requires_grad([critic], True)
        optimizers[1].zero_grad()
        fake = generator(noise).detach()
        penalty = gradient_penalty(critic, real, fake, torch.rand(4, 1, generator=drawn))
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        optimizers[1].step()
        run.keep("critic's loss", loss)
        if step % 2 == 1:
            if freezes:
                set_requires_grad([critic], False)
            optimizers[0].zero_grad()
            loss = -critic(generator(noise)).mean()
            loss.backward()
            optimizers[0].step()
            run.keep("generator's loss", loss)
    run.keep_state("generator", generator_net)
    run.keep_state("critic", critic_net)


class ResidualBlock(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [[nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width)] for _ in range(2)]
        self.block = nn.Sequential(*layers[0], nn.ReLU(True), *layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


def translator(width: int, blocks: int) -> nn.Module:
    """CycleGAN's generator: down, residual blocks, up."""
    return nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(3, width, 3), nn.InstanceNorm2d(width), nn.ReLU(True),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.InstanceNorm2d(2 * width), nn.ReLU(True),
        *[ResidualBlock(2 * width) for _ in range(blocks)],
        nn.ConvTranspose2d(2 * width, width, 3, stride=2, padding=1, output_padding=1),
        nn.InstanceNorm2d(width), nn.ReLU(True), nn.ReflectionPad2d(1), nn.Conv2d(width, 3, 3), nn.Tanh(),
    )  # fmt: skip


def patch_discriminator(width: int) -> nn.Module:
    """CycleGAN's discriminator: a score for each patch."""
    return nn.Sequential(
        nn.Conv2d(3, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2, True),
        nn.Conv2d(width, 2 * width, 4, stride=1, padding=1), nn.InstanceNorm2d(2 * width), nn.LeakyReLU(0.2, True),
        nn.Conv2d(2 * width, 1, 2),
    )  # fmt: skip


def scored(scores: torch.Tensor, real: bool) -> torch.Tensor:
    """The least squares loss of a discriminator."""
    return F.mse_loss(scores, torch.full_like(scores, float(real)))


def generators_loss(nets: list[nn.Module], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Adversarial, cycle and identity losses of both generators; and what they made of both images."""
    g_a, g_b, d_a, d_b = nets
    fake_b, fake_a = g_a(a), g_b(b)
    cycle = F.l1_loss(g_b(fake_b), a) + F.l1_loss(g_a(fake_a), b)
    identity = F.l1_loss(g_a(b), b) + F.l1_loss(g_b(a), a)
    return scored(d_a(fake_b), True) + scored(d_b(fake_a), True) + 10 * cycle + 5 * identity, fake_a, fake_b


def cyclegan(run: Run) -> None:
    """Two generators with one optimizer, two discriminators with another, which are frozen in every other pass."""
    width, blocks = 4 * run.rng.randint(1, 2), run.rng.randint(1, 2)
    plain = [
        translator(width, blocks),
        translator(width, blocks),
        patch_discriminator(width),
        patch_discriminator(width),
    ]
    nets = [run.wrap(net) for net in plain]
    ups, downs = nets[:2], nets[2:]
    optimizers = [
        torch.optim.Adam(itertools.chain(*(net.parameters() for net in pair)), lr=2e-3, betas=(0.5, 0.999))
        for pair in (ups, downs)
    ]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - step / 9) for each in optimizers]
    for step in range(STEPS):
        a, b = torch.rand(2, 1, 3, 8, 8, generator=run.generator(step))
        set_requires_grad(downs, False)
        optimizers[0].zero_grad()
        loss, fake_a, fake_b = generators_loss(nets, a, b)
        loss.backward()
        optimizers[0].step()
        run.keep("generators' loss", loss)
        set_requires_grad(downs, True)
        optimizers[1].zero_grad()
        for net, real, fake in ((downs[0], b, fake_b), (downs[1], a, fake_a)):
            loss = (scored(net(real), True) + scored(net(fake.detach()), False)) / 2
            loss.backward()
            run.keep("discriminator's loss", loss)
        optimizers[1].step()
        for scheduler in schedulers:
            scheduler.step()
    for number, net in enumerate(plain):
        run.keep_state(f"net {number}", net)


# ---- all of them -------------------------------------------------------------------------------------------------

TASKS: dict[str, tuple[str, TaskOf]] = {
    "T5": ("transformers", t5),
    "BART": ("transformers", bart),
    "Whisper": ("transformers", whisper),
    "BERT": ("transformers", bert),
    "GPT-2": ("transformers", gpt2),
    "Llama": ("transformers", llama),
    "Mixtral": ("transformers", mixtral),
    "ViT": ("transformers", vit),
    "CLIP": ("transformers", clip),
    "ResNet": ("transformers", resnet),
    "DenseNet": ("torch", densenet),
    "UNet2D": ("diffusers", unet),
    "UNet2DCondition": ("diffusers", conditional_unet),
}

LOOPS = [
    Program("LSTM", "torch", recurrent),
    Program("WGAN-GP", "torch", wgan),
    Program("CycleGAN", "torch", cyclegan),
    Program("LoRA", "peft", lora),
    Program("staged unfreezing", "transformers", staged_unfreezing),
    Program("EMA", "transformers", exponential_average),
    Program("SAM", "transformers", sam),
    Program("Lookahead", "transformers", lookahead),
    Program("Lookahead, outside of step", "transformers", lookahead_outside),
    Program("Lion", "lion_pytorch", lion),
    Program("Prodigy", "prodigyopt", prodigy, may_refuse=True),
    Program("Schedule-Free", "schedulefree", schedule_free),
]

PROGRAMS: dict[str, Program] = {
    **{name: Program(name, package, finetune(task_of)) for name, (package, task_of) in TASKS.items()},
    **{program.name: program for program in LOOPS},
}
