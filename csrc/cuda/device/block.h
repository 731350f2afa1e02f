// One block: channel blockIdx.x of the rank in ranks[blockIdx.y]. It has the channel's part of the segments, and every
// wait has a time limit. When a wait fails, the first thread that gives up records the reason, the whole block returns
// together, and so do the blocks of all peers. Unless a method says otherwise, all threads of the block call it
// together.
#pragma once

#include "core/schedule.h"
#include "cuda/device/args.h"
#include "cuda/device/intrinsics.h"

namespace ringcomm::cuda {

// Polls of a flag between two checks of the clock and the abort flags. In the emulator a poll in vain pauses the
// thread.
#if defined(RINGCOMM_EMULATE)
inline constexpr u32 kSpinsPerCheck = 8;
#else
inline constexpr u32 kSpinsPerCheck = 256;
#endif

class Block {
 public:
  RINGCOMM_DEVICE Block(const Layout& layout, const RankArgs& rank, u64 timeout_ns)
      : layout_(layout), args_(rank), deadline_(now_ns() + timeout_ns) {}

  RINGCOMM_DEVICE int channel() const { return static_cast<int>(blockIdx.x); }
  RINGCOMM_DEVICE int num_channels() const { return static_cast<int>(gridDim.x); }
  RINGCOMM_DEVICE int thread() const { return static_cast<int>(threadIdx.x); }
  RINGCOMM_DEVICE int threads() const { return static_cast<int>(blockDim.x); }
  RINGCOMM_DEVICE int rank() const { return args_.rank; }
  RINGCOMM_DEVICE int world_size() const { return layout_.world_size; }
  RINGCOMM_DEVICE const RankArgs& args() const { return args_; }
  RINGCOMM_DEVICE const Layout& layout() const { return layout_; }

  // This channel in the segment of any rank.
  RINGCOMM_DEVICE char* of(int rank) const { return args_.segment_of(rank) + layout_.channel_at(channel()); }
  RINGCOMM_DEVICE ChannelState& state() const {
    return *reinterpret_cast<ChannelState*>(args_.segment + layout_.channel_at(channel()));
  }
  RINGCOMM_DEVICE Flag* consumed(int rank) const { return flag(of(rank) + layout_.consumed_at()); }
  RINGCOMM_DEVICE Flag* barrier_flags(int rank) const { return flag(of(rank) + layout_.barriers_at()); }
  RINGCOMM_DEVICE SlotHeader* published(int rank) const {
    return reinterpret_cast<SlotHeader*>(of(rank) + layout_.published_at());
  }
  RINGCOMM_DEVICE Board board(int rank) const {
    return Board::at(of(rank) + layout_.board_at(), layout_.depth, layout_.slot_bytes);
  }
  // Two staging regions are used in turn for outgoing data, and two for the shards that `rank` has reduced.
  RINGCOMM_DEVICE char* stage(int rank, int region) const {
    return of(rank) + layout_.stage_at() + region * layout_.stage_bytes;
  }
  RINGCOMM_DEVICE char* shard(int rank, int region) const {
    return of(rank) + layout_.stage_at() + 2 * layout_.stage_bytes + region * layout_.shard_bytes();
  }
  // Where `rank` receives the packets of `source`.
  RINGCOMM_DEVICE char* box(int rank, int source, u64 parity) const {
    return of(rank) + layout_.boxes_at() + (parity * layout_.world_size + source) * layout_.box_bytes();
  }

  RINGCOMM_DEVICE void sync() const { __syncthreads(); }

  // Called by one thread: waits until *flag >= target. False: it gave up, and the reason is recorded.
  RINGCOMM_DEVICE bool wait(const Flag* flag, u64 target, int peer, WaitKind kind) const {
    u64 seen;
    for (u32 spins = 1; (seen = peek(flag)) < target; ++spins) {
      if (spins % kSpinsPerCheck == 0 && must_stop(flag, target, seen, peer, kind)) return false;
      pause_on(flag, target);
    }
    if (RINGCOMM_FAULT != Fault::kFlagWithoutAcquire)
      load_acquire(flag);  // the polls were relaxed: an acquire per poll would empty the L1 cache
    return true;
  }
  // The same for threads that poll packets: called after every poll in vain, with a counter of the thread's own.
  RINGCOMM_DEVICE bool keep_looking(const void* line, u64 wanted, u32& spins, int peer) const {
    if (++spins % kSpinsPerCheck == 0 && must_stop(nullptr, wanted, 0, peer, WaitKind::kPackets)) return false;
    pause_on(line, wanted);
    return true;
  }
  // Barrier of the block. True: every thread's wait succeeded.
  RINGCOMM_DEVICE bool agree(bool ok) const { return __syncthreads_and(ok) != 0; }

  // Barrier of all ranks' blocks of this channel: after it, all of them see what any of them wrote before it.
  RINGCOMM_DEVICE bool rank_barrier() const {
    if (RINGCOMM_FAULT != Fault::kNoBarrierBeforeRankBarrier)
      sync();  // every thread has written, and has read state().barriers of the barrier before
    const u64 target = load_one(&state().barriers) + 1;
    bool ok = true;
    if (const int peer = thread(); peer < world_size()) {
      if (peer != rank()) {
        post(barrier_flags(peer) + rank(), target);
        ok = RINGCOMM_FAULT == Fault::kRankBarrierWaitsForNobody ||
             wait(barrier_flags(rank()) + peer, target, peer, WaitKind::kBarrier);
      }
    }
    ok = agree(ok);
    if (thread() == 0) store_one(&state().barriers, target);
    return ok;
  }

  // The signature of the next call on this channel.
  RINGCOMM_DEVICE Signature sign(Op op, DType dtype, ReduceOp reduce_op, Algorithm algorithm, int root,
                                 u64 count) const {
    return {load_one(&state().calls),
            load_one(&state().history),
            count,
            static_cast<std::uint8_t>(op),
            static_cast<std::uint8_t>(dtype),
            static_cast<std::uint8_t>(reduce_op),
            static_cast<std::uint8_t>(algorithm),
            root};
  }
  // Called by one thread: whether the peer makes the same call.
  RINGCOMM_DEVICE bool same(const Signature& mine, const Signature& theirs, int peer) const {
    if (mine == theirs || RINGCOMM_FAULT == Fault::kSignaturesNotCompared) return true;
    report(Failure::kMismatch, WaitKind::kNone, peer, 0, 0, mine, theirs);
    return false;
  }
  // Ends the call. To be called last, and not after a wait has failed.
  RINGCOMM_DEVICE void finish(const Signature& signature) const {
    if (RINGCOMM_FAULT != Fault::kNoBarrierBeforeFinish) sync();  // no thread reads the counters any more
    if (thread() != 0) return;
    store_one(&state().calls, signature.sequence + 1);
    store_one(&state().history, signature.hash());
  }

  // Sends this rank's signature and buffer locations to every peer, and waits for theirs. Afterwards
  // published(rank())[p] holds what rank p has published (this rank's own included). `note` travels in `offset`; the
  // part_bytes that thread p passes are for rank p.
  RINGCOMM_DEVICE bool publish_buffers(const Signature& signature, u32 note = 0, u64 part_bytes = 0) const {
    bool ok = true;
    if (const int peer = thread(); peer < world_size()) {
      SlotHeader* const there = &published(peer)[rank()];
      store_one(&there->offset, note);
      store_one(&there->signature, signature);
      store_one(&there->factor, args_.factor);
      store_one(&there->input, args_.input);
      store_one(&there->output, args_.output);
      store_one(&there->part_bytes, part_bytes);
      post(&there->flag, signature.sequence + 1);
      const SlotHeader* const here = &published(rank())[peer];
      ok = wait(&here->flag, signature.sequence + 1, peer, WaitKind::kPublished) &&
           same(signature, load_one(&here->signature), peer);
    }
    return agree(ok);
  }
  // The address of a peer's buffer on this rank; null: this rank cannot access it.
  RINGCOMM_DEVICE char* resolve(int peer, const Location& at) const {
    if (!at.visible) return nullptr;
    if (at.arena < 0) return reinterpret_cast<char*>(at.where);
    char* const base = args_.table->regions[peer][at.arena];
    return base ? base + at.where : nullptr;
  }

  // Called by one thread: records the failure, unless this rank has recorded one already, and stops all ranks.
  RINGCOMM_DEVICE void report(Failure failure, WaitKind kind, int peer, u64 expected, u64 seen, const Signature& mine,
                              const Signature& theirs) const {
    const bool first = first_to_report(layout_, args_);
    if (first) {
      Status& status = args_.table->host->status;
      store_one(&status.mine, mine);
      store_one(&status.theirs, theirs);
    }
    write_down(layout_, args_, first, failure, kind, peer, expected, seen);
  }

 private:
  RINGCOMM_DEVICE static Flag* flag(char* at) { return reinterpret_cast<Flag*>(at); }

  RINGCOMM_DEVICE bool must_stop(const Flag*, u64 target, u64 seen, int peer, WaitKind kind) const {
    return must_stop(layout_, args_, deadline_, target, seen, peer, kind);
  }

  // Code that hardly ever runs is compiled once per kernel, not at every wait. Its arguments are plain, so that nothing
  // needs a stack.
  RINGCOMM_COLD static bool must_stop(const Layout& layout, const RankArgs& args, u64 deadline, u64 target, u64 seen,
                                      int peer, WaitKind kind) {
    const bool aborted = load_relaxed(flag(args.segment)) != 0 || load_relaxed(&args.table->host->abort.value) != 0;
    if (!aborted && now_ns() < deadline) return false;
    write_down(layout, args, first_to_report(layout, args), aborted ? Failure::kAborted : Failure::kTimeout, kind, peer,
               target, seen);
    return true;
  }
  RINGCOMM_DEVICE static bool first_to_report(const Layout& layout, const RankArgs& args) {
    return claim_once(flag(args.segment + layout.reported_at()));
  }
  RINGCOMM_COLD static void write_down(const Layout& layout, const RankArgs& args, bool first, Failure failure,
                                       WaitKind kind, int peer, u64 expected, u64 seen) {
    if (first) {
      const int channel = static_cast<int>(blockIdx.x);
      Status& status = args.table->host->status;
      store_one(&status.wait, static_cast<u32>(kind));
      store_one(&status.peer, peer);
      store_one(&status.channel, channel);
      store_one(&status.expected, expected);
      store_one(&status.seen, seen);
      const char* const state = args.segment + layout.channel_at(channel);
      const bool counts = channel < layout.channels;  // links may have more of them
      store_one(&status.calls, counts ? load_one(&reinterpret_cast<const ChannelState*>(state)->calls) : 0);
      post(&status.code, static_cast<u64>(failure));
    }
    for (int p = 0; p < layout.world_size; ++p) post(flag(args.segment_of(p)), 1);
  }

  const Layout& layout_;
  const RankArgs& args_;
  const u64 deadline_;
};

}  // namespace ringcomm::cuda
