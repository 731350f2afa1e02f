// Data movement without arithmetic: all_gather, broadcast, gather, scatter, all_to_all, barrier. Three ways:
//
//   known    the launch has the pointers of all ranks: plain copies, no flags
//   direct   the ranks publish where their buffers lie, and all that a peer must access are visible: push to the
//            peers' outputs or pull from the root's input, or both, then a barrier of the ranks
//   staged   otherwise: window by window through the staging areas: write, barrier, pull
//
// No deadlock: the ranks wait for each other only in publish_buffers() and in rank_barrier(). All ranks' blocks of a
// channel choose the same way and the same number of windows, because they decide on the same published facts.
#include "core/schedule.h"
#include "cuda/device/kernels.h"
#include "cuda/device/move.h"

namespace ringcomm::cuda {

namespace {

using Addresses = char* [kMaxRanks];  // by rank

template <typename Args>
class ExchangeBlock {
 public:
  RINGCOMM_DEVICE ExchangeBlock(const Block& block, const Args& args)
      : block_(block),
        args_(args),
        exchanges_(args.exchanges + blockIdx.y * args.layout.world_size),
        signature_(block.sign(args.op, args.dtype, ReduceOp::kSum, args.algorithm, args.root, args.signed_count)) {}

  RINGCOMM_DEVICE void run() {
    const int p = block_.thread();
    if (!block_.publish_buffers(signature_, lines_of_longest_part(), p < world_size() ? exchanges_[p].give_bytes : 0))
      return;
    if (args_.op == Op::kAllToAll && !block_.agree(same_parts())) return;
    copy_own_part();
    const bool ok = args_.op == Op::kBarrier ? block_.rank_barrier() : sees_all_buffers() ? direct() : staged();
    if (ok) block_.finish(signature_);
  }

 private:
  RINGCOMM_DEVICE int rank() const { return block_.rank(); }
  RINGCOMM_DEVICE int world_size() const { return block_.world_size(); }
  // The peers in turn; each rank begins with a different one.
  RINGCOMM_DEVICE int peer(int i) const {
    const int p = rank() + i;
    return p < world_size() ? p : p - world_size();
  }
  RINGCOMM_DEVICE const SlotHeader& said(int peer) const { return block_.published(rank())[peer]; }

  // Decides the number of windows: the ranks take the longest part of any of them.
  RINGCOMM_DEVICE u32 lines_of_longest_part() const {
    u64 most = 0;
    for (int i = 1; i < world_size(); ++i)
      most = larger(most, larger(exchanges_[peer(i)].give_bytes, exchanges_[peer(i)].take_bytes));
    return static_cast<u32>(ceil_div(most, kLineBytes));
  }
  // Only all_to_all has parts that no signature covers. The counts of a mismatch report are then bytes.
  RINGCOMM_DEVICE bool same_parts() const {
    const int p = block_.thread();
    if (p >= world_size() || p == rank()) return true;
    Signature mine = signature_, theirs = signature_;
    mine.count = kUneven | exchanges_[p].take_bytes;
    theirs.count = kUneven | load_one(&said(p).part_bytes);
    return block_.same(mine, theirs, p);
  }

  RINGCOMM_DEVICE void copy_own_part() const {
    char* const to = exchanges_[rank()].take;
    if (exchanges_[rank()].take_bytes == 0 || to == exchanges_[rank()].give) return;
    copy_tiles(0, exchanges_[rank()].give, exchanges_[rank()].take_bytes, [&](const auto& f) { f(to); });
  }

  // ---- direct -------------------------------------------------------------------------------------------------------

  RINGCOMM_DEVICE bool pulls() const { return args_.op == Op::kBroadcast || args_.op == Op::kScatter; }
  // Whether this is a broadcast whose outputs are visible too. Then every rank pulls a share from the root and pushes
  // it to the others, so that the root sends the message about twice instead of once to each rank.
  RINGCOMM_DEVICE bool spreads() const {
    if (args_.op != Op::kBroadcast) return false;
    for (int p = 0; p < world_size(); ++p)
      if (p != args_.root && !load_one(&said(p).output).visible) return false;
    return true;
  }
  // Whether `peer` has a buffer that others access.
  RINGCOMM_DEVICE bool is_touched(int peer, bool spreads) const {
    const bool rooted = pulls() || args_.op == Op::kGather;
    return !rooted || spreads || peer == args_.root;
  }
  RINGCOMM_DEVICE Location touched(int peer) const {
    const bool input = pulls() && (peer == args_.root || args_.op == Op::kScatter);
    return load_one(input ? &said(peer).input : &said(peer).output);
  }

  // Decided on facts that all ranks share. Parts are where the peers expect them only if they are even, and an
  // all_to_all in place would overwrite data that is still to be read.
  RINGCOMM_DEVICE bool sees_all_buffers() const {
    if (args_.signed_count & kUneven) return false;
    for (int p = 0; p < world_size(); ++p) {
      if (!is_touched(p, false)) continue;
      const Location at = touched(p), input = load_one(&said(p).input);
      if (!at.visible) return false;
      if (args_.op == Op::kAllToAll && input.visible && at.arena == input.arena && at.where == input.where)
        return false;
    }
    return true;
  }
  // to[p]: the address at which this rank reads or writes data of p. False: the host has not mapped a buffer that
  // was published as visible.
  RINGCOMM_DEVICE bool find_buffers(Addresses& to, bool spreads) const {
    const int p = block_.thread();
    bool found = true;
    if (p < world_size() && p != rank() && is_touched(p, spreads)) {
      char* const base = block_.resolve(p, touched(p));
      found = base != nullptr;
      if (!found) block_.report(Failure::kMismatch, WaitKind::kPublished, p, 0, 0, signature_, signature_);
      const u64 part = pulls() ? exchanges_[p].take_bytes : exchanges_[p].give_bytes;
      to[p] = base + (args_.op == Op::kBroadcast ? 0 : rank() * part);
    }
    return block_.agree(found);
  }
  RINGCOMM_DEVICE bool direct() const {
    RINGCOMM_SHARED(Addresses, at);
    const bool spreads = this->spreads();
    if (!find_buffers(at, spreads)) return false;
    const int root = args_.root;
    if (spreads) {
      const u64 nbytes = rank() == root ? exchanges_[root].give_bytes : exchanges_[root].take_bytes;
      const Slice share = shard_of(nbytes, world_size(), rank(), kLineBytes);
      const char* const from = rank() == root ? exchanges_[root].give : at[root];
      copy_tiles(0, from + share.offset, share.count, [&](const auto& f) {
        for (int i = 0; i < world_size(); ++i) {
          const int p = peer(i);
          if (p != root) f((p == rank() ? exchanges_[root].take : at[p]) + share.offset);
        }
      });
    } else if (args_.op == Op::kAllGather) {
      copy_tiles(0, exchanges_[peer(1)].give, exchanges_[peer(1)].give_bytes, [&](const auto& f) {
        for (int i = 1; i < world_size(); ++i) f(at[peer(i)]);
      });
    } else if (args_.op == Op::kAllToAll) {
      for (int i = 1; i < world_size(); ++i) push(i, peer(i), at);
    } else if (rank() != root && pulls()) {
      copy_tiles(0, at[root], exchanges_[root].take_bytes, [&](const auto& f) { f(exchanges_[root].take); });
    } else if (rank() != root) {
      push(0, root, at);
    }
    return block_.rank_barrier();
  }
  RINGCOMM_DEVICE void push(int turn, int p, const Addresses& at) const {
    copy_tiles(turn, exchanges_[p].give, exchanges_[p].give_bytes, [&](const auto& f) { f(at[p]); });
  }

  // ---- staged -------------------------------------------------------------------------------------------------------

  RINGCOMM_DEVICE bool staged() const {
    u64 most = 0, turn = load_one(&block_.state().turns);
    for (int p = 0; p < world_size(); ++p) most = larger(most, load_one(&said(p).offset) * u64{kLineBytes});
    const WindowCut cut = cut_for_channels(most, 1, room(), kLineBytes, kLeastBytes, block_.num_channels());
    u64 window = block_.channel();
    // A block without a window, too, passes a barrier after publish_buffers().
    if (window >= cut.windows() && !block_.rank_barrier()) return false;
    for (; window < cut.windows(); window += block_.num_channels(), ++turn) {
      give(cut.slice(0, window), turn & 1);
      if (!block_.rank_barrier()) return false;
      take(cut.slice(0, window), turn & 1);
    }
    if (block_.thread() == 0) store_one(&block_.state().turns, turn);  // all threads have read it before a barrier
    return true;
  }
  // Bytes of one part in a staging region.
  RINGCOMM_DEVICE u64 room() const {
    return args_.same_for_all ? block_.layout().stage_bytes : block_.layout().stage_bytes / world_size();
  }
  RINGCOMM_DEVICE char* place(int from, int to, int region) const {
    return block_.stage(from, region) + (args_.same_for_all ? 0 : to * room());
  }
  RINGCOMM_DEVICE static u32 within(const Slice& s, u64 nbytes) {
    return static_cast<u32>(s.offset < nbytes ? smaller(s.count, nbytes - s.offset) : 0);
  }
  RINGCOMM_DEVICE void give(const Slice& s, int region) const {
    for (int i = 1; i < world_size(); ++i) {
      const int p = peer(i);
      const u32 nbytes = within(s, exchanges_[p].give_bytes);
      if (nbytes == 0) continue;
      copy_run(block_, exchanges_[p].give + s.offset, nbytes, place(rank(), p, region));
      if (args_.same_for_all) return;
    }
  }
  RINGCOMM_DEVICE void take(const Slice& s, int region) const {
    for (int i = 1; i < world_size(); ++i) {
      const int p = peer(i);
      const u32 nbytes = within(s, exchanges_[p].take_bytes);
      if (nbytes != 0) copy_run(block_, place(p, rank(), region), nbytes, exchanges_[p].take + s.offset);
    }
  }

  const Block& block_;
  const Args& args_;
  const Exchange* const exchanges_;  // by peer
  const Signature signature_;
};

template <typename Args>
RINGCOMM_KERNEL(kMostThreads)
exchange_parts(const __grid_constant__ Args args) {
  const Block block(args.layout, args.ranks[blockIdx.y], args.timeout_ns);
  ExchangeBlock<Args>(block, args).run();
}

RINGCOMM_KERNEL(kMostThreads) copy_between_ranks(const __grid_constant__ CopyArgs args) {
  const int end = args.first[blockIdx.y + 1];
  for (int i = args.first[blockIdx.y]; i < end; i += static_cast<int>(args.copies[i].targets)) {
    const int targets = static_cast<int>(args.copies[i].targets);
    copy_tiles(i, args.copies[i].source, args.copies[i].nbytes, [&](const auto& f) {
      for (int k = 0; k < targets; ++k) f(args.copies[i + k].target);
    });
  }
}

}  // namespace

Kernel<CopyArgs> copy_kernel() { return copy_between_ranks; }
Kernel<ExchangeArgs> exchange_kernel() { return exchange_parts<ExchangeArgs>; }
Kernel<ManyExchangeArgs> many_exchange_kernel() { return exchange_parts<ManyExchangeArgs>; }

}  // namespace ringcomm::cuda
