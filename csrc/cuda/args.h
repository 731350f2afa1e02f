// What the host and the kernels of the CUDA engine agree on: the layout of a rank's segment, and the arguments of a
// launch. Plain data, passed by value.
//
// A launch has the grid (channels, ranks): block (c, y) is channel c of the rank in ranks[y]. A channel keeps what it
// knows of earlier calls (their number, its tickets) in its ChannelState in device memory, never in an argument, so
// that a captured graph can be replayed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/link.h"
#include "core/op.h"
#include "core/types.h"
#include "cuda/faults.h"

namespace ringcomm::cuda {

inline constexpr int kMaxRanks = 8;
inline constexpr int kMaxChannels = 64, kUsualChannels = 16;
inline constexpr int kMaxMessages = 16;
inline constexpr int kMaxCopies = kMaxRanks * kMaxRanks;
inline constexpr int kMaxArenas = 64;
inline constexpr int kMaxBuffers = 192;  // allocations of user memory that a rank shows to other processes
inline constexpr int kMaxRegions = kMaxArenas + kMaxBuffers;  // of a rank: its arenas, then user memory

// ---- the segment: one allocation per rank, in its own device memory, that every peer can read and write -------------

// Written by its own rank only; survives from launch to launch.
struct alignas(kLineBytes) ChannelState {
  std::uint64_t calls;     // collective calls this channel has made
  std::uint64_t history;   // hash of their signatures
  std::uint64_t meets;     // meets it has passed
  std::uint64_t turns;     // windows that went through the staging area
  std::uint64_t sent;      // tickets of its ring link towards next
  std::uint64_t received;  // tickets of its ring link from prev
  std::uint64_t packets;   // oneshot messages
};

// What the reader of a send/recv link tells the writer. It lies in the writer's segment.
struct alignas(kLineBytes) LinkCredit {
  Flag consumed;        // tickets
  std::int32_t pulled;  // 1: the reader has copied all of the long message that began with the newest ticket
  std::int32_t unused;
  Location target;  // if `pulled` is 0: where the writer shall copy that message
};

// Words of calls that copy without a kernel, one pair for each peer that writes them: numbers of calls, see
// copy_engine.h.
struct alignas(kLineBytes) CopyWords {
  std::uint32_t ready, done;  // together the size of a Flag, so that both are read at once
};

struct Layout {
  std::int32_t world_size = 1;
  std::int32_t channels = 1;         // most channels of any launch
  std::uint32_t depth = 4;           // slots of a ring link
  std::uint32_t p2p_depth = 4;       // slots of a send/recv link
  std::int32_t p2p_channels = 1;     // most blocks that serve one send or recv
  std::uint64_t slot_bytes = 0;      // of a ring link; multiple of kLineBytes
  std::uint64_t stage_bytes = 0;     // of a staging region, a channel has two; multiple of kLineBytes * world_size
  std::uint64_t packet_bytes = 0;    // most payload of one channel's oneshot message; multiple of 1920
  std::uint64_t p2p_slot_bytes = 0;  // multiple of kLineBytes

  RINGCOMM_HD constexpr std::uint64_t board_bytes() const { return depth * (sizeof(SlotHeader) + slot_bytes); }
  RINGCOMM_HD constexpr std::uint64_t p2p_board_bytes() const {
    return p2p_depth * (sizeof(SlotHeader) + p2p_slot_bytes);
  }
  // A box of packets: the signature in LL lines, LL lines of half payload, LL128 lines of 15 parts payload in 16. The
  // two kinds never share a place: what is data to one could be a flag to the other.
  RINGCOMM_HD constexpr std::uint64_t ll_at() const { return kLineBytes; }
  RINGCOMM_HD constexpr std::uint64_t ll128_at() const { return ll_at() + 2 * packet_bytes; }
  RINGCOMM_HD constexpr std::uint64_t box_bytes() const { return ll128_at() + packet_bytes / 15 * 16; }

  // One channel: state, consumed, meets, announcements, board, two regions for what goes out, two for a reduced shard,
  // boxes.
  RINGCOMM_HD constexpr std::uint64_t shard_bytes() const { return stage_bytes / world_size; }
  RINGCOMM_HD constexpr std::uint64_t consumed_at() const { return sizeof(ChannelState); }
  RINGCOMM_HD constexpr std::uint64_t meets_at() const { return consumed_at() + sizeof(FlagLine); }
  RINGCOMM_HD constexpr std::uint64_t announced_at() const { return meets_at() + kLineBytes; }
  RINGCOMM_HD constexpr std::uint64_t board_at() const { return announced_at() + kMaxRanks * sizeof(SlotHeader); }
  RINGCOMM_HD constexpr std::uint64_t stage_at() const { return board_at() + board_bytes(); }
  RINGCOMM_HD constexpr std::uint64_t boxes_at() const { return stage_at() + 2 * (stage_bytes + shard_bytes()); }
  RINGCOMM_HD constexpr std::uint64_t channel_bytes() const { return boxes_at() + 2 * world_size * box_bytes(); }

  // One send/recv link: the tickets of this rank as writer towards a peer and as reader from it, what the peer says as
  // reader, the board that the peer writes.
  RINGCOMM_HD constexpr std::uint64_t link_credit_at() const { return sizeof(ChannelState); }
  RINGCOMM_HD constexpr std::uint64_t link_board_at() const { return link_credit_at() + sizeof(LinkCredit); }
  RINGCOMM_HD constexpr std::uint64_t link_bytes() const { return link_board_at() + p2p_board_bytes(); }

  // The segment: abort flag, once-only flag of the status report, the probe lines of connect (0: of the rank itself,
  // 1 + p: what peer p wrote), words by peer, channels, links by (peer, p2p channel).
  RINGCOMM_HD constexpr std::uint64_t reported_at() const { return sizeof(FlagLine); }
  RINGCOMM_HD constexpr std::uint64_t probe_at(int line) const { return 2 * sizeof(FlagLine) + line * kLineBytes; }
  RINGCOMM_HD constexpr std::uint64_t copy_words_at(int peer) const {
    return probe_at(1 + kMaxRanks) + peer * sizeof(CopyWords);
  }
  RINGCOMM_HD constexpr std::uint64_t channel_at(int channel) const {
    return copy_words_at(kMaxRanks) + channel * channel_bytes();
  }
  RINGCOMM_HD constexpr std::uint64_t link_at(int peer, int channel) const {
    return channel_at(channels) + (static_cast<std::uint64_t>(peer) * p2p_channels + channel) * link_bytes();
  }
  RINGCOMM_HD constexpr std::uint64_t segment_bytes() const { return link_at(world_size, 0); }
};

// ---- the host page: mapped host memory, one per rank ----------------------------------------------------------------

enum class Failure : std::uint32_t { kNone, kTimeout, kAborted, kMismatch };
enum class WaitKind : std::uint32_t { kNone, kSlice, kCredit, kAnnouncement, kMeet, kPackets, kMessage };

// The first failure on this rank. `code` is stored last.
struct Status {
  Flag code;           // Failure
  std::uint32_t wait;  // WaitKind
  std::int32_t peer, channel;
  std::uint32_t unused;
  std::uint64_t expected, seen;  // value of the flag waited for
  std::uint64_t calls;           // of the channel
  Signature mine, theirs;        // theirs: kMismatch only
};

struct alignas(kLineBytes) HostPage {
  FlagLine abort;  // set by the host; kernels check it now and then
  Status status;
  FlagLine stopped;  // the segment's abort flag, copied here by a stream
};

// ---- arguments of a launch ------------------------------------------------------------------------------------------

struct RankArgs {
  std::int32_t rank;
  std::int32_t unused;
  double factor;           // premul_sum
  Location input, output;  // of messages[0], as it is announced to the peers
  HostPage* host;
  char* const* arenas;        // [peer * kMaxRegions + region]: its address on this rank; null: none
  char* segments[kMaxRanks];  // of every rank, as mapped on this rank
};

// One message of a call: the pointers of the ranks in this launch.
//   all_reduce, reduce, broadcast   count elements
//   reduce_scatter, all_gather, ... count elements of one part
// The elements are the kernel's (Arithmetic::scale of them in one of the caller's); bytes where nothing is reduced.
// With CallArgs::parts, input[p] of message r is part r of rank p, of `count` elements, and output[r] is rank r's.
struct Message {
  const void* input[kMaxRanks];
  void* output[kMaxRanks];
  std::uint64_t count;
};

struct CallArgs {
  Op op;
  DType dtype;
  ReduceOp reduce_op;
  Algorithm algorithm;
  std::int32_t root;
  std::int32_t wide_packets;  // oneshot: LL128 instead of LL
  std::int32_t num_messages;
  std::int32_t parts;  // 1: reduce_scatter of world_size messages, message r being the parts for rank r
  std::int32_t unused;
  std::uint64_t signed_count;  // the count of the signature
  std::uint64_t timeout_ns;
  Layout layout;
  std::int8_t ring_order[kMaxRanks];  // ring_order[position] = rank
  RankArgs ranks[kMaxRanks];          // by blockIdx.y
  Message messages[kMaxMessages];

  RINGCOMM_HD constexpr int divisor() const { return reduce_op == ReduceOp::kAvg ? layout.world_size : 1; }
  RINGCOMM_HD constexpr bool scales() const { return reduce_op == ReduceOp::kPremulSum; }
};
static_assert(sizeof(CallArgs) <= 4096, "kernel arguments have 4 KiB");

// One piece that a rank's blocks copy. A copy with targets > 1 is followed by targets - 1 entries with the other
// targets of the same source.
struct Copy {
  const char* source;
  char* target;
  std::uint64_t nbytes;
  std::uint64_t targets;
};

// What a rank's part of a data movement consists of where pointers of the peers are not known at launch: what it gives
// to each peer, and where it puts what it gets from each. Element counts are bytes.
//   give[rank], take[rank]  its own part, copied here unless it is in place (equal addresses); only take_bytes counts
//   all_to_all              every give_bytes and take_bytes is set: the ranks compare them
// RankArgs::input and output are `visible` only where parts are even and lie one after the other (input of scatter and
// all_to_all, output of all_gather, gather and all_to_all), and where every peer has mapped the arena.
struct Exchange {
  const char* give[kMaxRanks];
  char* take[kMaxRanks];
  std::uint64_t give_bytes[kMaxRanks];
  std::uint64_t take_bytes[kMaxRanks];
};

// all_gather, broadcast, gather, scatter, all_to_all, barrier.
struct CopyArgs {
  Op op;
  DType dtype;
  Algorithm algorithm;
  std::uint8_t unused;
  std::int32_t root;
  std::int32_t known;
  std::int32_t same_for_all;  // give[] is one piece for every peer: it is staged once
  std::uint64_t signed_count;
  std::uint64_t timeout_ns;
  Layout layout;
  std::int32_t first[kMaxRanks + 1];  // known: copies [first[y], first[y + 1]) belong to ranks[y]
  std::int32_t unused2;
  RankArgs ranks[kMaxRanks];
  union {
    Copy copies[kMaxCopies];        // known
    Exchange exchanges[kMaxRanks];  // else: by blockIdx.y
  };
};
static_assert(sizeof(CopyArgs) <= 4096, "kernel arguments have 4 KiB");

// Sends and receives of one rank: grid (most channels of a transfer, num_transfers). Messages of one peer in one
// direction keep their order: the blocks of the first of them serve them all. All others are independent. A receive
// takes the oldest message on its link, whose tag, type and count must match.
inline constexpr int kMaxTransfers = 16;
struct Transfer {
  char* data;
  std::uint64_t nbytes;
  std::uint64_t count;
  Location at;            // of `data`, for the peer
  std::int32_t channels;  // that share it; follows from the size, so it is the same at both ends
  std::int32_t unused;
  std::int32_t peer;
  std::int32_t tag;
  std::int32_t sends;
  DType dtype;
};
struct TransferArgs {
  std::uint64_t timeout_ns;
  Layout layout;
  RankArgs rank;
  std::int32_t num_transfers;
  std::int32_t unused;
  Transfer transfers[kMaxTransfers];
};
static_assert(sizeof(TransferArgs) <= 4096, "kernel arguments have 4 KiB");

}  // namespace ringcomm::cuda
