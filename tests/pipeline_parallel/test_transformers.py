"""Models of Hugging Face transformers, as they are, through `split`: the bits of one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import AbortedError, InvalidArgumentError
from ringcomm.pipeline_parallel.pipeline import Pipeline
from tests.pipeline_parallel.test_runner import SCHEDULES, Gradients, differing, gradients, on_ranks
from tests.support.seeded import seeded

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, LENGTH, MICROBATCHES = 6, 7, 3


def llama(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=32, n_embd=16, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


MODELS = {"llama": (llama, "model.layers"), "gpt2": (gpt2, "transformer.h")}


def batch(padded: bool) -> dict[str, Any]:
    ids = torch.randint(31, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    if not padded:
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(LENGTH) >= torch.arange(ROWS)[:, None] % 3).long()  # on the left
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def parts_of(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    rows = ROWS // MICROBATCHES
    return [
        {key: x[i : i + rows] if torch.is_tensor(x) else x for key, x in inputs.items()} for i in range(0, ROWS, rows)
    ]


def plain(model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    model, total, logits = copy.deepcopy(model), torch.zeros(()), []
    for part in parts_of(inputs):
        output = model(**part)
        loss = output.loss / MICROBATCHES
        loss.backward()
        total = total + loss.detach()
        with torch.no_grad():  # whose bits are others for some models
            logits.append(model(**part).logits)
    return total, torch.cat(logits), gradients(model)


def check(
    model: nn.Module, at: list[str], world_size: int, inputs: dict[str, Any], carry: Sequence[str] = (), **options: Any
) -> None:
    loss, logits, expected = plain(model, inputs)

    def step(pipe: Pipeline, rank: int) -> Any:
        found = pipe.step(**inputs)
        evaluation = pipe.evaluate(**inputs)
        torch.testing.assert_close(evaluation.loss, loss)
        return found, gradients(pipe), evaluation.output

    done = on_ranks(model, at, world_size, step, carry, microbatches=MICROBATCHES, ties="exact", **options)
    assert all(torch.equal(found, loss) for found, _, _ in done), (done[0][0], loss)
    assert differing([grads for _, grads, _ in done], expected) == []
    assert torch.equal(done[-1][2].logits, logits)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [*MODELS])
def test_every_schedule(name: str, schedule: str) -> None:
    make, layers = MODELS[name]
    at = [f"{layers}.{i}" for i in ((1, 2, 3) if schedule == "interleaved" else (2,))]
    check(make(), at, 2, batch(False), schedule=schedule)


@pytest.mark.parametrize("name", [*MODELS])
def test_four_stages(name: str) -> None:
    make, layers = MODELS[name]
    check(make(), [f"{layers}.{i}" for i in (1, 2, 3)], 4, batch(False))


def mixtral() -> nn.Module:
    """Whose loss has the balance of all layers' routers, whose scores forward hooks collect."""
    config = transformers.MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4, output_router_logits=True,
        router_aux_loss_coef=0.5,
    )  # fmt: skip
    return seeded(transformers.MixtralForCausalLM(config))


@pytest.mark.parametrize("at", [["model.layers.2"], ["model.layers.1", "model.layers.3"]])
def test_losses_of_routers_are_carried(at: list[str]) -> None:
    check(mixtral(), at, len(at) + 1, batch(False), carry=["model.layers.*.mlp.gate"])


def test_losses_of_routers_that_nothing_carries_are_refused() -> None:
    def step(pipe: Pipeline, rank: int) -> str:
        with pytest.raises((InvalidArgumentError, AbortedError)) as error:
            pipe.step(**batch(False))
        return str(error.value)

    _, text = on_ranks(mixtral(), ["model.layers.2"], 2, step, microbatches=MICROBATCHES)
    assert "a result of model.layers.0.mlp.gate" in text
    assert "carry=" in text


CARRIED = {"llama": ["model.embed_tokens", "model.layers.*"], "gpt2": ["transformer.w*e", "transformer.h.*"]}


@pytest.mark.parametrize("name", [*MODELS])
def test_hidden_states_are_carried(name: str) -> None:
    make, layers = MODELS[name]
    model, inputs = make(), {"input_ids": batch(False)["input_ids"], "output_hidden_states": True}

    def evaluate(pipe: Pipeline, rank: int) -> Any:
        return pipe.evaluate(**inputs).output

    _, output = on_ranks(model, [f"{layers}.2"], 2, evaluate, CARRIED[name], microbatches=1)
    expected = model(**inputs).hidden_states
    assert len(output.hidden_states) == len(expected)
    assert all(map(torch.equal, output.hidden_states, expected))


@pytest.mark.parametrize("name", [*MODELS])
def test_each_input_where_it_is_needed(name: str) -> None:
    make, layers = MODELS[name]
    model, inputs = make(), batch(False)
    loss, _, expected = plain(model, inputs)

    def step(pipe: Pipeline, rank: int) -> Any:
        mine = [{"input_ids": inputs["input_ids"]}, {}, {"labels": inputs["labels"]}][rank]
        return pipe.step(**mine), gradients(pipe)

    done = on_ranks(model, [f"{layers}.1", f"{layers}.3"], 3, step, microbatches=MICROBATCHES, ties="exact")
    assert all(torch.equal(found, loss) for found, _ in done)
    assert differing([grads for _, grads in done], expected) == []


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", [*MODELS])
def test_padding(name: str, static: bool) -> None:
    make, layers = MODELS[name]
    check(make(), [f"{layers}.2"], 2, batch(True), static_shapes=static)


@pytest.mark.parametrize("name", [*MODELS])
def test_a_mask_on_rank_0_alone_is_an_error(name: str) -> None:
    make, layers = MODELS[name]
    inputs = batch(True)

    def step(pipe: Pipeline, rank: int) -> BaseException:
        with pytest.raises((InvalidArgumentError, AbortedError)) as error:
            pipe.step(**(inputs if rank == 0 else {"labels": inputs["labels"]}))
        return error.value

    first, last = on_ranks(make(), [f"{layers}.2"], 2, step, microbatches=MICROBATCHES)
    assert "pass the inputs on every rank" in str(last)
    assert isinstance(first, AbortedError)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", [*MODELS])
def test_gradient_checkpointing(name: str, schedule: str) -> None:
    make, layers = MODELS[name]
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    check(model, [f"{layers}.2"], 2, batch(False), schedule=schedule)


def test_llama_with_a_tied_head() -> None:
    check(llama(tie_word_embeddings=True), ["model.layers.1", "model.layers.3"], 3, batch(False))


def t5() -> nn.Module:
    """Whose embedding is used three times: by encoder, decoder and head."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=31,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("at", "carry"),
    [
        (["decoder.block.1"], []),
        (["encoder.block.1", "decoder.block.2"], []),
        (["decoder.final_layer_norm"], ["encoder"]),  # whose result is in the model's
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_t5_cut_in_the_decoder(schedule: str, at: list[str], carry: list[str]) -> None:
    check(t5(), at, len(at) + 1, {**batch(True), "use_cache": False}, carry, schedule=schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_with_tensor_parallel(schedule: str) -> None:
    model, inputs = llama(), batch(False)
    loss, logits, expected = plain(model, inputs)
    models = [copy.deepcopy(model) for _ in range(4)]

    def rank_main(comm: Communicator) -> Any:
        mesh = ringcomm.init_mesh({"pp": 2, "tp": 2}, comm)
        cut = ringcomm.parallelize(models[comm.rank], None, mesh["tp"])
        pipe = Pipeline(
            ringcomm.split(cut, ["model.layers.2"]), mesh["pp"], microbatches=MICROBATCHES, schedule=schedule
        )
        found = pipe.step(**inputs)
        norms = {name: p.grad for name, p in pipe.named_parameters() if "norm" in name}
        return found, norms, pipe.evaluate(**inputs).output

    done = ringcomm.run_ranks(rank_main, 4, timeout=30)
    for found, norms, output in done:
        torch.testing.assert_close(found, loss)
        assert norms
        for name, grad in norms.items():
            torch.testing.assert_close(grad, expected[name])
        if output is not None:
            torch.testing.assert_close(output.logits, logits)
