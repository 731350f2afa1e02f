"""The flat layout: nothing overlaps, nothing is lost, and shards cut only where they may."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringcomm.data_parallel.buckets.layout import ALIGN_BYTES, Atom, FlatLayout, Segment, up
from ringcomm.data_parallel.model.partition import blocks_of
from ringcomm.errors import InvalidArgumentError
from tests.support.choice import drawn

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=12)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64])
ATOMS: st.SearchStrategy[Atom] = st.one_of(st.sampled_from(["element", "row", "tensor"]), st.integers(1, 300))
WORLDS = st.integers(1, 9)


def specs_of(shapes: list[tuple[int, ...]], groups: int = 1) -> list[Segment]:
    return [Segment(f"p{i}", shape, i % groups) for i, shape in enumerate(shapes)]


@drawn(300)
@given(SHAPES, DTYPES, WORLDS, ATOMS, st.integers(1, 3))
def test_parameters_lie_apart_and_inside(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int, atom: Atom, groups: int
) -> None:
    layout = FlatLayout.build(specs_of(shapes, groups), dtype, world_size, atom)
    align = ALIGN_BYTES // dtype.itemsize
    assert sorted(s.name for s in layout.segments) == sorted(f"p{i}" for i in range(len(shapes)))
    assert [s.group for s in layout.segments] == sorted(s.group for s in layout.segments)
    assert layout.numel == world_size * layout.shard_numel
    assert layout.shard_numel % align == 0
    assert layout.shard_numel > 0
    for segment in layout.segments:
        assert segment.offset % align == 0
        assert segment.end <= layout.numel
        assert segment.numel == math.prod(segment.shape)
    assert all(a.end <= b.offset for a, b in pairwise(s for s in layout.segments if s.numel))
    assert layout.used_numel == sum(math.prod(shape) for shape in shapes)


@drawn(300)
@given(SHAPES, DTYPES, WORLDS, ATOMS)
def test_shards_cut_at_atoms_only(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int, atom: Atom
) -> None:
    layout = FlatLayout.build(specs_of(shapes), dtype, world_size, atom)
    for rank in range(1, world_size):
        cut, _ = layout.shard_range(rank)
        for segment in layout.segments:
            if segment.offset < cut < segment.end:
                assert (cut - segment.offset) % segment.atom == 0
                assert atom != "tensor"


@drawn(200)
@given(SHAPES, DTYPES, WORLDS, ATOMS)
def test_fragments_of_the_shards_are_the_parameters(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int, atom: Atom
) -> None:
    layout = FlatLayout.build(specs_of(shapes), dtype, world_size, atom)
    seen = [0] * len(shapes)
    for rank in range(world_size):
        start, end = layout.shard_range(rank)
        for fragment in layout.fragments(start, end):
            segment = layout.segments[fragment.segment]
            assert fragment.numel > 0
            assert fragment.start == seen[fragment.segment]  # in order, without a gap
            assert start + fragment.offset == segment.offset + fragment.start
            assert fragment.offset + fragment.numel <= end - start
            seen[fragment.segment] += fragment.numel
    assert seen == [segment.numel for segment in layout.segments]
    whole = layout.fragments(0, layout.numel)
    assert [(f.start, f.numel) for f in whole] == [(0, s.numel) for s in layout.segments if s.numel]


@drawn(200)
@given(SHAPES, DTYPES, WORLDS, st.data())
def test_runs_cover_what_their_optimizer_group_owns(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world_size: int, data: st.DataObject
) -> None:
    layout = FlatLayout.build(specs_of(shapes, 2), dtype, world_size)
    groups = data.draw(st.lists(st.integers(-1, 2), min_size=len(shapes), max_size=len(shapes)))
    align = ALIGN_BYTES // dtype.itemsize
    for rank in range(world_size):
        start, end = layout.shard_range(rank)
        owned = {f.segment: f for f in layout.fragments(start, end, empty=True)}
        covered = set()
        runs = layout.runs(start, end, groups)
        assert all(a.end <= b.start for a, b in pairwise(runs))
        for run in runs:
            some = [i for i in run.segments if owned[i].numel]
            assert start <= run.start <= run.end <= end
            assert (run.start < run.end) == bool(some)
            assert run.start % align == 0
            assert run.end % align == 0 or run.end == end
            for i in run.segments:
                fragment = owned[i]
                assert groups[i] == run.group >= 0
                assert run.start <= start + fragment.offset
                assert start + fragment.offset + fragment.numel <= run.end
                covered.add(i)
            inside = [i for i, f in owned.items() if f.numel and run.start <= start + f.offset < run.end]
            assert sorted(some) == inside  # nobody else's
        assert covered == {i for i in owned if groups[i] >= 0}


@drawn(200)
@given(SHAPES, WORLDS)
def test_shards_of_elements_are_as_short_as_alignment_lets_them(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = FlatLayout.build(specs_of(shapes), torch.float32, world_size)
    padded = sum(up(math.prod(shape), 32) for shape in shapes)
    assert layout.shard_numel == max(32, up(-(-padded // world_size), 32))


@drawn(100)
@given(SHAPES, WORLDS, st.sampled_from(["row", "tensor"]))
def test_coarser_atoms_cost_at_most_the_largest_parameter(
    shapes: list[tuple[int, ...]], world_size: int, atom: Atom
) -> None:
    even = FlatLayout.build(specs_of(shapes), torch.float32, world_size)
    layout = FlatLayout.build(specs_of(shapes), torch.float32, world_size, atom)
    largest = max(up(math.prod(shape), 32) for shape in shapes)
    assert layout.shard_numel <= even.shard_numel + largest


def test_a_layout_is_a_pure_function() -> None:
    specs = specs_of([(3, 5), (7,), (), (64, 64)], 2)
    assert FlatLayout.build(specs, torch.float32, 3, "row") == FlatLayout.build(list(specs), torch.float32, 3, "row")


def test_an_example() -> None:
    """Three parameters of 40, 33 and 1 elements: 64, 64 and 32 with their padding, in two shards."""
    layout = FlatLayout.build([Segment("a", (8, 5)), Segment("b", (33,)), Segment("c", ())], torch.float32, 2)
    assert [s.offset for s in layout.segments] == [0, 64, 128]
    assert layout.shard_numel == 96
    assert [(f.segment, f.start, f.offset, f.numel) for f in layout.fragments(96, 192)] == [
        (1, 32, 0, 1),
        (2, 0, 32, 1),
    ]
    assert [(r.group, r.start, r.end, r.segments) for r in layout.runs(0, 96, [0, 0, 1])] == [(0, 0, 96, (0, 1))]
    assert [(r.group, r.start, r.end, r.segments) for r in layout.runs(96, 192, [0, 0, 1])] == [
        (0, 96, 128, (1,)),
        (1, 128, 160, (2,)),
    ]


@pytest.mark.parametrize("atom", ["page", 0, -3, 1.5])
def test_a_wrong_atom_is_refused(atom: Atom) -> None:
    with pytest.raises(InvalidArgumentError, match=r"layout: got atom=.* for a, expected"):
        FlatLayout.build([Segment("a", (2, 3))], torch.float32, 2, atom)


def _modules(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def _linears(n: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(2, 2) for _ in range(n))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (_modules(layers=_linears(2), head=nn.Linear(2, 2)), ["layers.0", "layers.1"]),
        (_modules(layers=nn.ModuleList([_modules(inner=_linears(2))])), ["layers.0.inner.0", "layers.0.inner.1"]),
        (_modules(gpt=nn.ModuleDict({"wte": nn.Embedding(2, 2), "h": _linears(2)})), ["gpt.h.0", "gpt.h.1"]),
        (_modules(heads=nn.ModuleDict({"a": nn.Sequential(*_linears(2)), "b": nn.Sequential(*_linears(2))})), []),
        (_modules(moe=_modules(gate=nn.Linear(2, 2), experts=_linears(2))), []),
        (_modules(tasks=nn.ModuleDict({"a": _modules(layers=_linears(2)), "b": nn.Linear(2, 2)})), []),
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), ["0", "2"]),
    ],
)
def test_blocks_are_in_lists_that_every_rank_runs(module: nn.Module, expected: list[str]) -> None:
    assert [name for name, _ in blocks_of(module)] == expected
