// oneshot: a small all_reduce without published buffers or barriers of the ranks. Every rank pushes its values into a
// box at every peer, as packets that carry their own flag, and reduces the contents of its own boxes in canonical
// order. The signature goes first, as packets of the same box. A channel serves one piece of the message.
//
// There are two sets of boxes, used in turn by the parity of ChannelState::packets. A box is written again two messages
// later. By then its writer has received all packets of the message in between, which the reader sent only after its
// block had read the box to the end. Working in place is safe, because the thread that writes an element of the output
// is the one that has read it from the input.
//
// The flag of a message is never one that the line still holds from earlier: an LL flag has 31 bits, and before its
// values repeat, all lines of the boxes are cleared.
#pragma once

#include "cuda/device/arithmetic.h"
#include "cuda/device/combine.h"

namespace ringcomm::cuda {

inline constexpr u64 kFlagPeriod = 1ull << 31;
RINGCOMM_HD constexpr u32 ll_flag(u64 packets) { return static_cast<u32>(packets % kFlagPeriod) + 1; }

// LL lines of 8 bytes each, which go first in a box: the signature.
inline constexpr int kHeaderLines = sizeof(Signature) / 8;
static_assert(kHeaderLines * sizeof(Vec) <= kLineBytes, "the header does not fit before the packets");

RINGCOMM_DEVICE Block block_until(const CallArgs& args, u64 deadline) {
  const u64 now = now_ns();
  return {args.layout, args.ranks[blockIdx.y], now < deadline ? deadline - now : 0};
}
RINGCOMM_DEVICE Signature signature_of(const CallArgs& args, const Block& block) {
  return block.sign(args.signed_op, args.dtype, args.reduce_op, args.algorithm, args.root, args.signed_count);
}
// The peer whose header this thread serves, if there is such a peer. The last threads do this, as they have the fewest
// packets.
RINGCOMM_DEVICE int header_peer(const Block& block) { return block.threads() - 1 - block.thread(); }

RINGCOMM_DEVICE_CALL void push_header(const CallArgs& args, u64 packets) {
  const Block block(args.layout, args.ranks[blockIdx.y], 0);
  const int peer = header_peer(block);
  if (peer >= block.world_size() || peer == block.rank()) return;
  const Signature signature = signature_of(args, block);
  u32 words[2 * kHeaderLines];
  __builtin_memcpy(words, &signature, sizeof signature);
  Vec* const line = reinterpret_cast<Vec*>(block.box(peer, block.rank(), packets & 1));
  RINGCOMM_UNROLL for (int i = 0; i < kHeaderLines; ++i)
      store_ll(line + i, words[2 * i], words[2 * i + 1], ll_flag(packets));
}

// All polls are issued together; the line that was stored last is polled last.
RINGCOMM_DEVICE bool look_header(const Vec* line, u32 flag, u32* words) {
  bool there[kHeaderLines], all = true;
  RINGCOMM_UNROLL for (int i = 0; i < kHeaderLines; ++i) there[i] =
      look_ll(line + i, flag, words[2 * i], words[2 * i + 1]);
  RINGCOMM_UNROLL for (int i = 0; i < kHeaderLines; ++i) all = all && there[i];
  return all;
}
// Called by the threads that serve headers: whether the peer makes the same call.
RINGCOMM_DEVICE_CALL bool check_header(const CallArgs& args, u64 deadline, u64 packets) {
  const Block block = block_until(args, deadline);
  const int peer = header_peer(block);
  if (peer >= block.world_size() || peer == block.rank()) return true;
  const Vec* const line = reinterpret_cast<const Vec*>(block.box(block.rank(), peer, packets & 1));
  u32 words[2 * kHeaderLines];
  u32 spins = 0;
  while (!look_header(line, ll_flag(packets), words))
    if (!block.keep_looking(line + kHeaderLines - 1, packets + 1, spins, peer)) return false;
  Signature theirs;
  __builtin_memcpy(&theirs, words, sizeof theirs);
  return block.same(signature_of(args, block), theirs, peer);
}

// Called after many polls of `line` in vain. False: gave up.
RINGCOMM_DEVICE_CALL bool look_again(const CallArgs& args, u64 deadline, const void* line, u64 packets, int peer) {
  u32 spins = kSpinsPerCheck - 1;
  return block_until(args, deadline).keep_looking(line, packets + 1, spins, peer);
}

// Called when the block has read its boxes to the end.
RINGCOMM_DEVICE_CALL void end_packets(const CallArgs& args, u64 packets) {
  const Block block(args.layout, args.ranks[blockIdx.y], 0);
  if (packets % kFlagPeriod >= kFlagPeriod - 2)  // both sets, one after the other
    for (int p = 0; p < block.world_size(); ++p)
      for (u64 i = block.thread(); i < block.layout().ll128_at() / sizeof(Vec); i += block.threads())
        store_ll(reinterpret_cast<Vec*>(block.box(block.rank(), p, packets & 1)) + i, 0, 0, 0);
  if (block.thread() == 0) store_one(&block.state().packets, packets + 1);
  block.finish(signature_of(args, block));
}

// The piece of the message that a channel serves, as words of 8 bytes.
template <typename T>
class Words {
  static constexpr int kEach = 8 / sizeof(T);

 public:
  RINGCOMM_DEVICE Words(const T* input, T* output, u64 count)
      : input_(input),
        output_(output),
        count_(count),
        reads_whole_(reinterpret_cast<u64>(input) % 8 == 0),
        writes_whole_(reinterpret_cast<u64>(output) % 8 == 0) {}

  // Words past the end read as zeros.
  RINGCOMM_DEVICE void read(u64 word, u32* to) const {
    const u64 first = word * kEach;
    if (reads_whole_ && first + kEach <= count_) {
      const u64 both = load_one(reinterpret_cast<const u64*>(input_) + word);
      to[0] = static_cast<u32>(both);
      to[1] = static_cast<u32>(both >> 32);
      return;
    }
    to[0] = to[1] = 0;
    RINGCOMM_UNROLL for (int i = 0; i < kEach; ++i) {
      if (first + i < count_) put_element<T>(to, i, load_one(input_ + first + i));
    }
  }
  RINGCOMM_DEVICE void write(u64 word, const u32* from) const {
    const u64 first = word * kEach;
    if (writes_whole_ && first + kEach <= count_) {
      store_one(reinterpret_cast<u64*>(output_) + word, from[0] | static_cast<u64>(from[1]) << 32);
      return;
    }
    RINGCOMM_UNROLL for (int i = 0; i < kEach; ++i) {
      if (first + i < count_) store_one(output_ + first + i, element<T>(from, i));
    }
  }
  RINGCOMM_DEVICE u64 count() const { return ceil_div(count_, kEach); }

 private:
  const T* const input_;
  T* const output_;
  const u64 count_;
  const bool reads_whole_, writes_whole_;
};

// Each thread handles a line of 8 bytes.
class LL {
 public:
  static constexpr int kWords = 1;
  RINGCOMM_DEVICE explicit LL(u64 packets) : flag_(ll_flag(packets)) {}
  RINGCOMM_DEVICE static u64 lines_at(const Layout& layout) { return layout.ll_at(); }
  RINGCOMM_DEVICE static u64 first() { return threadIdx.x; }
  RINGCOMM_DEVICE static u64 step() { return blockDim.x; }
  RINGCOMM_DEVICE static u64 steps_of(u64 words) { return words; }
  RINGCOMM_DEVICE static u64 word(u64 step) { return step; }
  RINGCOMM_DEVICE static bool has([[maybe_unused]] int word) { return true; }
  RINGCOMM_DEVICE static u64 offset(u64 step) { return step * sizeof(Vec); }

  RINGCOMM_DEVICE void push(char* lines, const u32* words) const {
    store_ll(reinterpret_cast<Vec*>(lines), words[0], words[1], flag_);
  }
  using Look = bool;  // whether the line was there
  RINGCOMM_DEVICE void look(const char* lines, u32* words, Look& look) const {
    look = look_ll(reinterpret_cast<const Vec*>(lines), flag_, words[0], words[1]);
  }
  RINGCOMM_DEVICE bool there(const Look& look) const { return look; }
  // Whether this thread polls on behalf of all that wait with it.
  RINGCOMM_DEVICE static bool speaks() { return true; }
  RINGCOMM_DEVICE static bool any(bool value) { return value; }

 private:
  const u32 flag_;
};

// A warp handles kWarp / 8 lines of 120 bytes at once: a lane has 16 bytes, the last lane of a line has 8 and the flag.
class LL128 {
 public:
  static constexpr int kWords = 2;
  static constexpr int kLines = kWarp / 8;
  RINGCOMM_DEVICE explicit LL128(u64 packets) : flag_(packets + 1) {}
  RINGCOMM_DEVICE static u64 lines_at(const Layout& layout) { return layout.ll128_at(); }
  RINGCOMM_DEVICE static u64 first() { return threadIdx.x / kWarp; }
  RINGCOMM_DEVICE static u64 step() { return blockDim.x / kWarp; }
  RINGCOMM_DEVICE static u64 steps_of(u64 words) { return ceil_div(words, 15 * kLines); }
  RINGCOMM_DEVICE static u64 word(u64 step) { return (step * kLines + lane_id() / 8) * 15 + lane_id() % 8 * 2; }
  RINGCOMM_DEVICE static bool has(int word) { return word == 0 || lane_id() % 8 != 7; }
  RINGCOMM_DEVICE static u64 offset(u64 step) { return step * kLines * 128; }

  RINGCOMM_DEVICE void push(char* lines, const u32* words) const {
    store_ll128(lines, words[0] | static_cast<u64>(words[1]) << 32,
                has(1) ? words[2] | static_cast<u64>(words[3]) << 32 : flag_);
  }
  using Look = u64;  // the last 8 bytes
  RINGCOMM_DEVICE void look(const char* lines, u32* words, Look& look) const {
    u64 a;
    load_ll128(lines, a, look);
    words[0] = static_cast<u32>(a);
    words[1] = static_cast<u32>(a >> 32);
    words[2] = static_cast<u32>(look);
    words[3] = static_cast<u32>(look >> 32);
  }
  RINGCOMM_DEVICE bool there(const Look& look) const {
    return !any_in_warp(!has(1) && look != flag_ && RINGCOMM_FAULT != Fault::kFlagOfWideLineIgnored);
  }
  RINGCOMM_DEVICE static bool speaks() { return lane_id() == 0; }
  RINGCOMM_DEVICE static bool any(bool value) { return any_in_warp(value); }

 private:
  const u64 flag_;
};

template <typename T, typename Combine>
class OneShot {
 public:
  RINGCOMM_DEVICE OneShot(const CallArgs& args, const Words<T>& words, u64 packets, u64 deadline)
      : args_(args),
        words_(words),
        rank_(args.ranks[blockIdx.y].rank),
        world_size_(args.layout.world_size),
        packets_(packets),
        deadline_(deadline) {}

  template <typename Lines>
  RINGCOMM_DEVICE void push(const Lines& lines) const {
    const u64 steps = lines.steps_of(words_.count());
    for (u64 i = lines.first(); i < steps; i += lines.step()) {
      u32 own[2 * Lines::kWords];
      read<Lines>(i, own);
      for (int p = ring_next(rank_, world_size_); p != rank_; p = ring_next(p, world_size_))
        lines.push(box<Lines>(p, rank_) + lines.offset(i), own);
    }
  }
  // False: gave up now, or had given up before (`ok`).
  template <typename Lines>
  RINGCOMM_DEVICE bool pull(const Lines& lines, bool ok) const {
    constexpr int kWords = 2 * Lines::kWords;
    if (lines.any(!ok)) return false;
    const Combiner<T, Combine, kMaxPacketRanks> combiner(world_size_, args_.divisor());
    const u64 steps = lines.steps_of(words_.count());
    for (u64 i = lines.first(); i < steps; i += lines.step()) {
      u32 own[kWords], value[kMaxPacketRanks][kWords] = {}, result[2];
      read<Lines>(i, own);
      if (!await(lines, i, value)) return false;
      RINGCOMM_UNROLL for (int p = 0; p < kMaxPacketRanks; ++p) {
        RINGCOMM_UNROLL for (int k = 0; k < kWords; ++k) value[p][k] = p == rank_ ? own[k] : value[p][k];
      }
      RINGCOMM_UNROLL for (int k = 0; k < Lines::kWords; ++k) {
        if (!lines.has(k)) continue;
        combiner.template combine_words<2>(result, [&](int p) { return value[p] + 2 * k; });
        words_.write(lines.word(i) + k, result);
      }
    }
    return true;
  }

 private:
  // Where the lines from `source` lie at `rank`.
  template <typename Lines>
  RINGCOMM_DEVICE char* box(int rank, int source) const {
    const Layout& layout = args_.layout;
    return args_.ranks[blockIdx.y].segment_of(rank) + layout.channel_at(static_cast<int>(blockIdx.x)) +
           layout.boxes_at() +
           ((RINGCOMM_FAULT == Fault::kBoxesDoNotTakeTurns ? 0 : packets_ & 1) * world_size_ + source) *
               layout.box_bytes() +
           Lines::lines_at(layout);
  }
  template <typename Lines>
  RINGCOMM_DEVICE void read(u64 i, u32* own) const {
    RINGCOMM_UNROLL for (int k = 0; k < Lines::kWords; ++k) {
      own[2 * k] = own[2 * k + 1] = 0;
      if (Lines::has(k)) words_.read(Lines::word(i) + k, own + 2 * k);
    }
  }
  // Waits for all peers' packets of step i; they are polled together.
  template <typename Lines, int kWords>
  RINGCOMM_DEVICE bool await(const Lines& lines, u64 i, u32 (&value)[kMaxPacketRanks][kWords]) const {
    u32 missing = ((1u << world_size_) - 1) & ~(1u << rank_);
    for (u32 spins = 1; missing != 0; ++spins) {
      const u32 wanted = missing;
      typename Lines::Look look[kMaxPacketRanks] = {};
      RINGCOMM_UNROLL for (int p = 0; p < kMaxPacketRanks; ++p) {
        if (wanted >> p & 1) lines.look(box<Lines>(rank_, p) + lines.offset(i), value[p], look[p]);
      }
      RINGCOMM_UNROLL for (int p = 0; p < kMaxPacketRanks; ++p) {
        if ((wanted >> p & 1) && lines.there(look[p])) missing &= ~(1u << p);
      }
      // A thread may pause only on a line that it has just polled in vain, or it might miss being woken: the one polled
      // last.
      const int last = highest(wanted);
      if (!(missing >> last & 1)) continue;
      bool gave_up = false;
      if (lines.speaks()) {
        const char* const line = box<Lines>(rank_, last) + lines.offset(i);
        if (spins % kSpinsPerCheck == 0)
          gave_up = !look_again(args_, deadline_, line, packets_, last);
        else
          pause_on(line, packets_ + 1);
      }
      if (lines.any(gave_up)) return false;
    }
    return true;
  }
  RINGCOMM_DEVICE static int highest(u32 bits) {
    int at = 0;
    RINGCOMM_UNROLL for (int p = 1; p < kMaxPacketRanks; ++p) at = bits >> p & 1 ? p : at;
    return at;
  }

  const CallArgs& args_;
  const Words<T>& words_;
  const int rank_, world_size_;
  const u64 packets_, deadline_;
};

template <typename T, typename Combine>
RINGCOMM_KERNEL(kMostThreads)
oneshot(const __grid_constant__ CallArgs args) {
  const RankArgs& rank = args.ranks[blockIdx.y];
  const auto& state = *reinterpret_cast<const ChannelState*>(rank.segment + args.layout.channel_at(blockIdx.x));
  const u64 packets = load_one(&state.packets), deadline = now_ns() + args.timeout_ns;
  const Slice piece = shard_of(args.counts[0], gridDim.x, blockIdx.x, kPerVec<T>);
  const MessageBuffers& buffers = args.buffers(0, blockIdx.y);
  const Words<T> words(static_cast<const T*>(buffers.input) + piece.offset,
                       static_cast<T*>(buffers.output) + piece.offset, piece.count);
  const OneShot<T, Combine> oneshot(args, words, packets, deadline);
  push_header(args, packets);
  if (args.wide_packets)
    oneshot.push(LL128(packets));
  else
    oneshot.push(LL(packets));
  bool ok = check_header(args, deadline, packets);
  ok = args.wide_packets ? oneshot.pull(LL128(packets), ok) : oneshot.pull(LL(packets), ok);
  if (!__syncthreads_and(ok)) return;
  end_packets(args, packets);
}

}  // namespace ringcomm::cuda
