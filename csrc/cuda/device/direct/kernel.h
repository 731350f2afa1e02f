// direct: all_reduce, reduce_scatter and reduce by reading the values of all ranks at once. Every element is reduced by
// one thread of one rank, in canonical order, and stored wherever it is needed: rank r reduces shard r of an all_reduce
// or reduce, and its own part of a reduce_scatter.
//
//   visible   the ranks publish where their buffers lie, work in place, and pass a barrier
//   staged    through the staging areas, in windows; three windows are in progress at once
//
// A launch that holds all ranks knows every pointer, and has a kernel of its own (known.h).
//
// A staged call has one barrier of the ranks per window. In step k, between two barriers, a rank
//
//   reduces window k             reads the staging regions k % 2 of all ranks, writes its shard region k % 2
//   stages window k + 1          writes its staging region (k + 1) % 2
//   copies out window k - 1      reads the shard regions (k - 1) % 2 of all ranks, writes its output
//
// No two of these touch the same region. Of the regions, each step reads only what was written in the step before, on
// the other side of a barrier. The regions that a step overwrites were last read in the step before, too: staging
// region (k + 1) % 2 held window k - 1, and shard region k % 2 held window k - 2. The steps of two calls cannot
// overlap, because a call begins only when all ranks have published it. Half of the warps move windows before they
// reduce, the others after it. The last step of a call reduces nothing and only copies out the last window.
#pragma once

#include "cuda/device/direct/reducer.h"
#include "cuda/device/direct/staging_layout.h"

namespace ringcomm::cuda {

// The next work of a block, and its progress.
struct Progress : Reduction {
  std::int32_t in_place;
  ReduceOp combine;  // the combining step of the call
  u64 round;         // of windows; in place there is one
  u64 turn;          // of the staging areas, at the window of this round
  u64 length, most;  // elements of the longest column, and of a window in it
  u64 deadline;
};

// The reduced shards of a window: the shard of rank p has `each` bytes, lies at `shards` in the segment of p,
// and is copied to `to` + p * each.
struct ReducedShards {
  const RankArgs& args;
  const int world_size;
  const u64 shards;
  const u32 each;
  char* const to;

  RINGCOMM_DEVICE const char* from(int p) const { return args.segment_of(p) + shards; }
  RINGCOMM_DEVICE int around(int p) const { return p < world_size ? p : p - world_size; }
};
// Copies the shards of kAtOnce ranks, from rank `first` on in ring order. A thread reads from all of them before it
// writes, so that it waits for their links together.
template <int kAtOnce>
RINGCOMM_DEVICE void copy_shards(const ReducedShards& reduced, int first) {
  constexpr int kBatch = 8 / kAtOnce;
  const u32 count = reduced.each / sizeof(Vec);
  const char* from[kAtOnce];
  RINGCOMM_UNROLL for (int k = 0; k < kAtOnce; ++k) from[k] = reduced.from(reduced.around(first + k));
  for (u32 i = threadIdx.x; i < count; i += kBatch * blockDim.x) {
    Vec value[kBatch][kAtOnce] = {};
    RINGCOMM_UNROLL for (int b = 0; b < kBatch; ++b) {
      const u32 at = i + b * blockDim.x;
      RINGCOMM_UNROLL for (int k = 0; k < kAtOnce; ++k) {
        if (at < count) value[b][k] = get<Vec>(from[k], at);
      }
    }
    RINGCOMM_UNROLL for (int b = 0; b < kBatch; ++b) {
      const u32 at = i + b * blockDim.x;
      RINGCOMM_UNROLL for (int k = 0; k < kAtOnce; ++k) {
        if (at < count) put(reduced.to + reduced.around(first + k) * reduced.each, at, value[b][k]);
      }
    }
  }
}
// Copies the bytes [begin, end) of a window. It begins with the rank's own shard, so that the ranks do not all read
// from one rank.
RINGCOMM_DEVICE_CALL void copy_out_shards(const RankArgs& args, int world_size, u64 shards, u32 each, u32 begin,
                                          u32 end, char* to) {
  const ReducedShards reduced{args, world_size, shards, each, to - begin};
  const auto is_whole = [&](int p) { return begin <= p * each && (p + 1) * each <= end && aligned(to); };
  for (int done = 0; done < world_size;) {
    const int p = reduced.around(args.rank + done);
    int whole = 0;
    while (whole < 8 && done + whole < world_size && is_whole(reduced.around(p + whole))) ++whole;
    if (whole >= 8) {
      copy_shards<8>(reduced, p);
      done += 8;
    } else if (whole >= 4) {
      copy_shards<4>(reduced, p);
      done += 4;
    } else if (whole >= 2) {
      copy_shards<2>(reduced, p);
      done += 2;
    } else {
      const u32 from = begin > p * each ? begin : p * each, until = end < (p + 1) * each ? end : (p + 1) * each;
      if (from < until)
        copy_to_both(blockDim.x, reduced.from(p) + (from - p * each), until - from, reduced.to + from, nullptr);
      done += 1;
    }
  }
}

// Everything about a call but its arithmetic.
class Direct {
 public:
  RINGCOMM_DEVICE Direct(const CallArgs& args, const Block& block, Progress& what, u64 element)
      : args_(args), block_(block), what_(what), element_(element), staging_(args, block.rank(), element) {}

  // Reads the factors and decides between in place and staged. False: a wait gave up.
  RINGCOMM_DEVICE bool begin() {
    const int t = block_.thread();
    if (!block_.publish_buffers(signature())) return false;
    if (t < world_size()) what_.factor[t] = args_.scales() ? said(t).factor : 1;
    const bool in_place = block_.agree(t >= world_size() || reachable(t));
    const bool found = !in_place || t >= world_size() || finds_buffers(t);
    if (t == 0) {
      what_.in_place = in_place;
      what_.round = 0;
      what_.length = staging_.length();
      what_.most =
          cut_windows(what_.length, block_.num_channels(), column_bytes() / element_, staging_.align()).slice_elements;
      what_.turn = load_one(&block_.state().turns);
      what_.deadline = now_ns() + args_.timeout_ns;
      what_.combine = arithmetic_for(args_.dtype, args_.reduce_op).op;
      what_.divisor = args_.divisor();
      what_.scaled = args_.scales();
      what_.num_sources = world_size();
      what_.num_targets = in_place && args_.op == Op::kAllReduce ? world_size() : 1;
    }
    return block_.agree(found);
  }
  // Ends the step of a reduction. False: a wait gave up.
  RINGCOMM_DEVICE bool deliver() {
    bool ok = true;
    const bool is_window = !what_.in_place && has(what_.round);
    if (!is_window || is_alone_with_the_last())
      block_.sync();
    else
      ok = block_.rank_barrier();
    if (block_.thread() == 0) {
      ++what_.round;
      if (is_window) ++what_.turn;
    }
    block_.sync();
    return ok;
  }
  // Prepares the next reduction. False: a wait gave up, or no reduction is left.
  RINGCOMM_DEVICE bool prepare() {
    if (what_.in_place) {
      if (what_.round == 1) return false;
      aim();
    } else {
      const u64 round = what_.round;
      if (!has(round) && (round == 0 || !has(round - 1))) return false;  // the same on all ranks
      if (round == 0) {
        stage(0);
        if (!block_.rank_barrier()) return false;
      }
      aim_at_window();
    }
    block_.sync();
    return true;
  }
  // Moves the windows before and after the one that is being reduced: half of the warps do it before they reduce, the
  // others after it.
  RINGCOMM_DEVICE void move_windows(bool before) const {
    const bool moves_first = block_.thread() / kWarp % 2 != 0;
    if (what_.in_place || before != moves_first) return;
    const u64 round = what_.round;
    if (has(round + 1)) stage(round + 1);
    if (round > 0) copy_out(round - 1);
  }
  RINGCOMM_DEVICE void end() {
    if ((what_.in_place || what_.round == 0) && !block_.rank_barrier()) return;
    if (block_.thread() == 0) store_one(&block_.state().turns, what_.turn);
    block_.finish(signature());
  }

 private:
  RINGCOMM_DEVICE int rank() const { return block_.rank(); }
  RINGCOMM_DEVICE int world_size() const { return block_.world_size(); }
  RINGCOMM_DEVICE const SlotHeader& said(int peer) const { return block_.published(rank())[peer]; }
  RINGCOMM_DEVICE const MessageBuffers& buffers(int message) const { return args_.buffers(message, blockIdx.y); }
  RINGCOMM_DEVICE Signature signature() const {
    return block_.sign(args_.signed_op, args_.dtype, args_.reduce_op, args_.algorithm, args_.root, args_.signed_count);
  }

  // ---- in place -----------------------------------------------------------------------------------------------------

  // Whether other ranks write to the output of `peer`.
  RINGCOMM_DEVICE bool is_written(int peer) const {
    return args_.op == Op::kAllReduce || (args_.op == Op::kReduce && peer == args_.root);
  }
  // Whether the call has one message, and other ranks can access the buffers of `peer` that they need. The same on all
  // ranks.
  RINGCOMM_DEVICE bool reachable(int peer) const {
    return args_.num_messages == 1 && !args_.parts && said(peer).input.visible &&
           (!is_written(peer) || said(peer).output.visible);
  }
  // False: the host has not mapped a buffer that the peer published as visible.
  RINGCOMM_DEVICE bool finds_buffers(int peer) const {
    const bool found = peer == rank() || (block_.resolve(peer, said(peer).input) &&
                                          (!is_written(peer) || block_.resolve(peer, said(peer).output)));
    if (found || RINGCOMM_FAULT == Fault::kMissingRegionUnnoticed) return true;
    const Signature mine = signature();
    block_.report(Failure::kMismatch, WaitKind::kPublished, peer, 0, 0, mine, mine);
    return false;
  }
  RINGCOMM_DEVICE const char* input(int p) const {
    if (p == rank()) return static_cast<const char*>(buffers(0).input);
    return block_.resolve(p, said(p).input);
  }
  RINGCOMM_DEVICE char* output(int p) const {
    if (p == rank()) return static_cast<char*>(buffers(0).output);
    return block_.resolve(p, said(p).output);
  }
  // Sets what this rank reduces of the message, and where the result goes.
  RINGCOMM_DEVICE void aim() {
    const u64 count = args_.counts[0];
    const bool scatters = staging_.scatters();
    const Slice own = scatters ? Slice{rank() * count, count} : shard_of(count, world_size(), rank(), staging_.align());
    if (const int p = block_.thread(); p < world_size() && own.count) {
      const u64 offset = own.offset * element_;
      what_.source[p] = input(p) + offset;
      if (args_.op == Op::kAllReduce) what_.target[p] = output(p) + offset;
      if (scatters && p == rank()) what_.target[0] = output(p);
      if (args_.op == Op::kReduce && p == args_.root) what_.target[0] = output(p) + offset;
    }
    if (block_.thread() != 0) return;
    what_.count = own.count;
    what_.first = block_.channel();
    what_.step = block_.num_channels();
  }

  // ---- through the staging areas ------------------------------------------------------------------------------------

  RINGCOMM_DEVICE u64 column_bytes() const {
    return staging_.scatters() ? block_.layout().shard_bytes() : block_.layout().stage_bytes;
  }
  // The shard of rank p in a window that is cut into shards.
  RINGCOMM_DEVICE Slice shard(const Slice& run, int p) const {
    return shard_of(run.count, world_size(), p, staging_.align());
  }
  // A window of this channel.
  RINGCOMM_DEVICE Slice window(u64 round) const {
    return WindowCut{what_.length, block_.num_channels(), what_.most}.slice(block_.channel(), round);
  }
  RINGCOMM_DEVICE bool has(u64 round) const { return window(round).count > 0; }
  // The regions that the window of a round uses.
  RINGCOMM_DEVICE int region(u64 round) const { return static_cast<int>((what_.turn + round - what_.round) & 1); }
  RINGCOMM_DEVICE char* staged(int p, u64 round) const {
    return block_.stage(p, RINGCOMM_FAULT == Fault::kStagesDoNotTakeTurns ? 0 : region(round));
  }
  RINGCOMM_DEVICE char* reduced(int p, u64 round) const {
    return block_.shard(p, RINGCOMM_FAULT == Fault::kShardsDoNotTakeTurns ? 0 : region(round));
  }
  // Whether no barrier is needed after this window: it is the last one, so no rank stages any more, and this rank
  // itself copies out what it has reduced.
  RINGCOMM_DEVICE bool is_alone_with_the_last() const {
    return (staging_.scatters() || RINGCOMM_FAULT == Fault::kNoRankBarrierBeforeCopyOut) && !has(what_.round + 1);
  }
  RINGCOMM_DEVICE void stage(u64 round) const {
    const int num_columns = staging_.scatters() ? world_size() : 1;
    for (int p = 0; p < num_columns; ++p)
      staging_.stage(block_, p, window(round), staged(rank(), round) + p * column_bytes());
  }
  RINGCOMM_DEVICE void copy_out(u64 round) const {
    const Slice run = window(round);
    if (staging_.scatters()) return staging_.copy_out(block_, run, reduced(rank(), round));
    if (args_.op == Op::kReduce && rank() != args_.root) return;
    const u32 each = static_cast<u32>(shard(run, 0).count * element_);  // bytes of a shard; the last ones may have less
    staging_.visit(rank(), run, [&](int m, u64 at, u64 offset, u64 count) {
      char* const to = static_cast<char*>(buffers(m).output) + at * element_;
      copy_out_shards(block_.args(), world_size(), reduced(rank(), round) - block_.args().segment, each,
                      static_cast<u32>(offset), static_cast<u32>(offset + count * element_), to);
    });
  }
  RINGCOMM_DEVICE void aim_at_window() {
    const u64 round = what_.round;
    const Slice run = window(round);
    const Slice own = staging_.scatters() ? Slice{0, run.count} : shard(run, rank());
    const u64 offset = staging_.scatters() ? rank() * column_bytes() : own.offset * element_;
    if (const int p = block_.thread(); p < world_size()) what_.source[p] = staged(p, round) + offset;
    if (block_.thread() == 0) {
      what_.target[0] = reduced(rank(), round);
      what_.count = own.count;
      what_.first = 0;
      what_.step = 1;
    }
  }

  const CallArgs& args_;
  const Block& block_;
  Progress& what_;
  const u64 element_;
  const StagingLayout staging_;
};

// For elements of one size, which avoids divisions by it. Runs beside a reduction of a staged call. The kernel itself
// calls it, because most registers are free there.
template <u64 kElement>
RINGCOMM_DEVICE_CALL void move_windows(const CallArgs& args, Progress& what, bool before) {
  const Block block(args.layout, args.ranks[blockIdx.y], 0);  // it waits for nobody
  Direct(args, block, what, kElement).move_windows(before);
}
// Determines what this block reduces next. False: the call is over.
template <u64 kElement>
RINGCOMM_DEVICE_CALL bool next_reduction(const CallArgs& args, Progress& what, bool first) {
  const u64 now = now_ns();
  const u64 left = first ? args.timeout_ns : now < what.deadline ? what.deadline - now : 0;
  const Block block(args.layout, args.ranks[blockIdx.y], left);
  Direct direct(args, block, what, kElement);
  if (!(first ? direct.begin() : direct.deliver())) return false;
  if (direct.prepare()) return true;
  direct.end();
  return false;
}

// Any combining step of a type: the protocol around the steps is compiled once for all of them.
template <typename T>
RINGCOMM_DEVICE void reduce_any(const Progress& what) {
#define X(e)                                 \
  if constexpr (kIsCompiled<T, ReduceOp::e>) \
    if (what.combine == ReduceOp::e) return Reducer<T, ReduceStep<ReduceOp::e>, kMaxRanks>(what).run();
  RINGCOMM_FOR_EACH_STEP(X)
#undef X
}

template <typename T>
RINGCOMM_KERNEL(kMostThreads)
direct(const __grid_constant__ CallArgs args) {
  RINGCOMM_SHARED(Progress, what);
  for (bool first = true; next_reduction<sizeof(T)>(args, what, first); first = false) {
    move_windows<sizeof(T)>(args, what, true);
    reduce_any<T>(what);
    move_windows<sizeof(T)>(args, what, false);
  }
}

template <TypeGroup kGroup>
Kernel<CallArgs> direct_of_group(DType dtype, ReduceOp op) {
  return kernel_of_group<CallArgs, kGroup>(
      dtype, op, [](auto element, auto) -> Kernel<CallArgs> { return direct<typename decltype(element)::Type>; });
}

}  // namespace ringcomm::cuda
