// The schedules: which rank sends which chunk when, which rank reduces which shard, and where a message is cut. These
// are pure functions that are proven at compile time; every engine, the simulator and the documents use them, and no
// other code computes `% world_size` on a chunk. Source of the ring: Patarasuk & Yuan 2009, JPDC 69(2).
#pragma once

#include <cstddef>

#include "core/macros.h"
#include "core/op.h"

namespace ringcomm {

RINGCOMM_HD constexpr std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }
RINGCOMM_HD constexpr std::size_t larger(std::size_t a, std::size_t b) { return a < b ? b : a; }
RINGCOMM_HD constexpr std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// ---- the ring ------------------------------------------------------------------------------------------------------

RINGCOMM_HD constexpr int ring_next(int rank, int world_size) { return rank + 1 == world_size ? 0 : rank + 1; }
RINGCOMM_HD constexpr int ring_prev(int rank, int world_size) { return rank == 0 ? world_size - 1 : rank - 1; }
// Hops from `from` to `to` in ring direction.
RINGCOMM_HD constexpr int ring_distance(int from, int to, int world_size) {
  return to >= from ? to - from : to - from + world_size;
}

// One schedule of 2(W-1) steps serves all_reduce, reduce_scatter and all_gather. Steps [0, W-1) are the reduce-scatter
// and leave chunk r complete on rank r; steps [W-1, 2(W-1)) are the all-gather. `last_step` is the end of the range.
RINGCOMM_HD constexpr int first_step(Op op, int world_size) { return op == Op::kAllGather ? world_size - 1 : 0; }
RINGCOMM_HD constexpr int last_step(Op op, int world_size) {
  return op == Op::kReduceScatter ? world_size - 1 : 2 * (world_size - 1);
}

struct RingStep {
  int send_chunk;  // chunk this rank sends to next
  int recv_chunk;  // chunk this rank receives from prev
  bool reduce;     // true: combine into the local chunk; false: overwrite it
};

// Invariants: recv_chunk(r, s) == send_chunk(r-1, s)   a rank receives what the previous rank sends
//             recv_chunk(r, s) == send_chunk(r, s+1)   a rank sends in the next step what it receives now
RINGCOMM_HD constexpr RingStep ring_step(int rank, int world_size, int step) {
  const int send = (rank + 2 * world_size - 1 - step) % world_size;
  return {send, (send + world_size - 1) % world_size, step < world_size - 1};
}

namespace proof {  // on bit masks of contributions: no rank is counted twice, and all chunks become complete

constexpr int kMaxWorldSize = 16;

constexpr bool all_reduce_is_complete(int world_size) {
  unsigned has[kMaxWorldSize][kMaxWorldSize] = {};  // has[rank][chunk]: ranks already summed in
  const unsigned all = (1u << world_size) - 1;
  for (int r = 0; r < world_size; ++r)
    for (int c = 0; c < world_size; ++c) has[r][c] = 1u << r;
  for (int step = 0; step < last_step(Op::kAllReduce, world_size); ++step) {
    unsigned wire[kMaxWorldSize] = {};
    for (int r = 0; r < world_size; ++r)
      wire[ring_next(r, world_size)] = has[r][ring_step(r, world_size, step).send_chunk];
    for (int r = 0; r < world_size; ++r) {
      const RingStep s = ring_step(r, world_size, step);
      if (s.recv_chunk != ring_step(ring_prev(r, world_size), world_size, step).send_chunk) return false;
      if (s.recv_chunk != ring_step(r, world_size, step + 1).send_chunk) return false;
      if (s.reduce && (has[r][s.recv_chunk] & wire[r])) return false;
      has[r][s.recv_chunk] = s.reduce ? has[r][s.recv_chunk] | wire[r] : wire[r];
    }
    if (step == world_size - 2)
      for (int r = 0; r < world_size; ++r)
        if (has[r][r] != all) return false;
  }
  for (int r = 0; r < world_size; ++r)
    for (int c = 0; c < world_size; ++c)
      if (has[r][c] != all) return false;
  return true;
}
constexpr bool all_reduce_is_complete_up_to(int n) {
  for (int w = 1; w <= n; ++w)
    if (!all_reduce_is_complete(w)) return false;
  return true;
}
static_assert(all_reduce_is_complete_up_to(kMaxWorldSize), "ring_step() is not an all-reduce");

}  // namespace proof

// ---- the cut -------------------------------------------------------------------------------------------------------

struct Slice {
  std::size_t offset, count;  // elements
};

// A message of `count` elements goes through the slots in windows of `chunks * slice_elements`; in every window chunk c
// is the c-th run of `slice_elements`. So chunk c of the message is the union of its slices, every slice is contiguous,
// and (chunk, window) identifies it.
struct WindowCut {
  std::size_t count = 0;
  int chunks = 1;
  std::size_t slice_elements = 1;

  RINGCOMM_HD constexpr std::size_t windows() const { return ceil_div(count, chunks * slice_elements); }
  RINGCOMM_HD constexpr Slice slice(int chunk, std::size_t window) const {
    const std::size_t begin = (window * chunks + chunk) * slice_elements;
    return {begin, begin < count ? smaller(slice_elements, count - begin) : 0};
  }
};

// A balanced cut: shrinks the slices so that all windows are about equally full, in multiples of `align` elements.
RINGCOMM_HD constexpr WindowCut cut_windows(std::size_t count, int chunks, std::size_t most_elements,
                                            std::size_t align) {
  const std::size_t windows = larger(1, ceil_div(count, chunks * most_elements));
  const std::size_t even = ceil_div(count, windows * chunks);
  return {count, chunks, larger(align, smaller(most_elements, ceil_div(even, align) * align))};
}

// Shard r of a message that is divided into `shards` contiguous pieces (the direct algorithm on visible memory).
RINGCOMM_HD constexpr Slice shard_of(std::size_t count, int shards, int shard, std::size_t align) {
  const std::size_t each = ceil_div(ceil_div(count, shards), align) * align;
  const std::size_t begin = smaller(count, each * shard);
  return {begin, smaller(each, count - begin)};
}

namespace proof {
constexpr bool cut_covers(std::size_t count, int chunks, std::size_t most, std::size_t align) {
  const WindowCut cut = cut_windows(count, chunks, most, align);
  std::size_t next = 0;
  for (std::size_t w = 0; w < cut.windows(); ++w)
    for (int c = 0; c < chunks; ++c) {
      const Slice s = cut.slice(c, w);
      if (s.count > most || (s.count && s.offset != next)) return false;
      next += s.count;
    }
  std::size_t end = 0;
  for (int r = 0; r < chunks; ++r) {
    const Slice s = shard_of(count, chunks, r, align);
    if (s.count && s.offset != end) return false;
    end += s.count;
  }
  return next == count && end == count;
}
static_assert(cut_covers(0, 3, 64, 16) && cut_covers(1, 3, 64, 16) && cut_covers(1000, 3, 64, 16),
              "a cut loses elements");
static_assert(cut_covers(4099, 8, 128, 16) && cut_covers(64, 1, 64, 64) && cut_covers(65, 5, 16, 1),
              "a cut loses elements");
}  // namespace proof

// ---- the canonical order -------------------------------------------------------------------------------------------

// The balanced tree over ranks splits `ranks` leaves at the largest power of two below `ranks`:
// ((0+1)+(2+3))+((4+5)+6) for seven.
RINGCOMM_HD constexpr int tree_split(int ranks) {
  int left = 1;
  while (2 * left < ranks) left *= 2;
  return left;
}

// Applies `combine(left, right)` to the leaves [first, first + N) in canonical order; `leaf(i)` returns the i-th value.
template <int N, typename Leaf, typename Combine>
RINGCOMM_HD constexpr auto tree_reduce(int first, const Leaf& leaf, const Combine& combine) {
  if constexpr (N == 1) {
    return leaf(first);
  } else {
    constexpr int kLeft = tree_split(N);
    return combine(tree_reduce<kLeft>(first, leaf, combine), tree_reduce<N - kLeft>(first + kLeft, leaf, combine));
  }
}

static_assert(tree_split(2) == 1 && tree_split(3) == 2 && tree_split(5) == 4 && tree_split(8) == 4,
              "the tree is not balanced");

}  // namespace ringcomm
