// The interface between the host and the kernels of the CUDA engine: the layout of a rank's segment, and the arguments
// of a launch. Plain data, passed by value.
//
// A launch has the grid (channels, ranks): block (c, y) is channel c of the rank in ranks[y]. A channel keeps its state
// from call to call (the number of calls, its tickets) in a ChannelState in device memory, never in an argument, so
// that a captured graph can be replayed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/link.h"
#include "core/op.h"
#include "core/types.h"
#include "cuda/device/faults.h"

namespace ringcomm::cuda {

inline constexpr int kMaxRanks = 32;       // of a communicator on one host
inline constexpr int kMaxLaunchRanks = 8;  // of one process on one device: they share a launch
inline constexpr int kMaxPacketRanks = 8;  // of a communicator that has oneshot
inline constexpr int kMaxChannels = 64, kUsualChannels = 24;
inline constexpr int kMaxMessages = 16;  // of a list that one launch serves
inline constexpr int kMaxCopies = kMaxLaunchRanks * kMaxLaunchRanks;
inline constexpr int kMaxArenas = 64;
inline constexpr int kMaxBuffers = 192;  // allocations of user memory that a rank shows to other processes
inline constexpr int kMaxRegions = kMaxArenas + kMaxBuffers;  // of a rank: its arenas, then user memory

// ---- the segment: one allocation per rank, in its own device memory, that every peer can read and write -------------

// Written by its own rank only; survives from launch to launch.
struct alignas(kLineBytes) ChannelState {
  std::uint64_t calls;     // collective calls this channel has made
  std::uint64_t history;   // hash of their signatures
  std::uint64_t barriers;  // of the ranks that it has passed
  std::uint64_t turns;     // windows that went through the staging area
  std::uint64_t sent;      // tickets of its ring link towards next
  std::uint64_t received;  // tickets of its ring link from prev
  std::uint64_t packets;   // oneshot messages
};

// Reports of a send/recv link's reader to its writer. They lie in the writer's segment.
struct alignas(kLineBytes) LinkCredit {
  Flag consumed;        // tickets
  std::int32_t pulled;  // 1: the reader has copied all of the long message that began with the newest ticket
  std::int32_t unused;
  Location target;  // if `pulled` is 0: where the writer must copy that message
};

// Words of calls that copy without a kernel, one pair for each peer that writes them: numbers of calls, see
// cuda/launch/copy_engine.h.
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
  std::uint64_t packet_bytes = 0;    // most payload of one channel's oneshot message; multiple of 1920; 0: no oneshot
  std::uint64_t p2p_slot_bytes = 0;  // multiple of kLineBytes

  RINGCOMM_HD constexpr std::uint64_t board_bytes() const { return depth * (sizeof(SlotHeader) + slot_bytes); }
  RINGCOMM_HD constexpr std::uint64_t p2p_board_bytes() const {
    return p2p_depth * (sizeof(SlotHeader) + p2p_slot_bytes);
  }
  // A box of packets: the signature in LL lines, LL lines of half payload, LL128 lines of 15 parts payload in 16. The
  // two kinds never share a place: what is data to one could be a flag to the other.
  RINGCOMM_HD constexpr std::uint64_t ll_at() const { return kLineBytes; }
  RINGCOMM_HD constexpr std::uint64_t ll128_at() const { return ll_at() + 2 * packet_bytes; }
  RINGCOMM_HD constexpr std::uint64_t box_bytes() const {
    return packet_bytes ? ll128_at() + packet_bytes / 15 * 16 : 0;
  }

  // One channel: state, consumed, barriers, published buffers, board, two regions for what goes out, two for a reduced
  // shard, boxes.
  RINGCOMM_HD constexpr std::uint64_t shard_bytes() const { return stage_bytes / world_size; }
  RINGCOMM_HD constexpr std::uint64_t consumed_at() const { return sizeof(ChannelState); }
  RINGCOMM_HD constexpr std::uint64_t barriers_at() const { return consumed_at() + sizeof(FlagLine); }
  RINGCOMM_HD constexpr std::uint64_t published_at() const {
    return barriers_at() + round_up(world_size * sizeof(Flag), kLineBytes);
  }
  RINGCOMM_HD constexpr std::uint64_t board_at() const { return published_at() + world_size * sizeof(SlotHeader); }
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
enum class WaitKind : std::uint32_t { kNone, kSlice, kCredit, kPublished, kBarrier, kPackets, kMessage };

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
  FlagLine stopped;                 // the segment's abort flag, copied here by a stream
  FlagLine one;                     // 1: copied from here to the abort flags of the segments
  CopyWords words_seen[kMaxRanks];  // by peer: where StreamWaits copies the segment's
};

// ---- arguments of a launch ------------------------------------------------------------------------------------------

// Bytes of arguments that every driver takes, and those that drivers from CUDA 12.1 on take. A launch takes longer the
// more arguments it has, because they are copied.
inline constexpr std::size_t kSmallArgs = 4096, kLargeArgs = 32764;

// The addresses of all ranks' memory, for the kernels of one rank. The table lies in that rank's device memory, because
// arguments are copied with every launch. It is complete once the ranks are connected; after that, only regions change.
struct RankTable {
  HostPage* host;
  char* segments[kMaxRanks];              // of every rank, as mapped on this rank
  char* regions[kMaxRanks][kMaxRegions];  // of every rank: its address on this rank; null: none
};

struct RankArgs {
  std::int32_t rank;
  std::int32_t unused;
  double factor;           // premul_sum
  Location input, output;  // of message 0, as it is published to the peers
  char* segment;           // the own one: the first thing that a kernel reads; the table is read beside it
  const RankTable* table;

  RINGCOMM_HD char* segment_of(int peer) const { return peer == rank ? segment : table->segments[peer]; }
};

// The pointers of one message at one rank.
struct MessageBuffers {
  const void* input;
  void* output;
};
inline constexpr int kMaxMessageBuffers = kMaxMessages * kMaxLaunchRanks;

struct CallArgs {
  Op op;
  DType dtype;
  ReduceOp reduce_op;
  Algorithm algorithm;
  std::int32_t root;
  std::int32_t wide_packets;  // oneshot: LL128 instead of LL
  std::int32_t num_ranks;     // of this launch: those of blockIdx.y
  std::int32_t num_messages;
  std::int32_t parts;  // 1: reduce_scatter of world_size messages, message r being the parts for rank r
  Op signed_op;        // of the signature: that of the call, of which this launch may serve a part
  std::uint64_t signed_count;
  std::uint64_t timeout_ns;
  Layout layout;
  std::int8_t ring_order[kMaxRanks];  // ring_order[position] = rank
  RankArgs ranks[kMaxLaunchRanks];    // by blockIdx.y
  // Of each message:
  //   all_reduce, reduce, broadcast   count elements
  //   reduce_scatter, all_gather, ... count elements of one part
  // The elements are the kernel's (Arithmetic::scale of them in one of the caller's); bytes where nothing is reduced.
  std::uint64_t counts[kMaxRanks];
  MessageBuffers all_buffers[kMaxMessageBuffers];

  // Of message m at the rank in ranks[y]. With `parts`, the input of message r is part r, and only rank r has an output
  // of it.
  RINGCOMM_HD constexpr const MessageBuffers& buffers(int m, int y) const { return all_buffers[m * num_ranks + y]; }
  constexpr MessageBuffers& buffers(int m, int y) { return all_buffers[m * num_ranks + y]; }
  RINGCOMM_HD constexpr int divisor() const { return reduce_op == ReduceOp::kAvg ? layout.world_size : 1; }
  RINGCOMM_HD constexpr bool scales() const { return reduce_op == ReduceOp::kPremulSum; }
};
static_assert(sizeof(CallArgs) <= kSmallArgs, "the arguments are to fit for every driver");
static_assert(kMaxMessages <= kMaxRanks, "a list has more messages than counts");

// One piece that a rank's blocks copy. A copy with targets > 1 is followed by targets - 1 entries with the other
// targets of the same source.
struct Copy {
  const char* source;
  char* target;
  std::uint64_t nbytes;
  std::uint64_t targets;
};

// Copies between the ranks of one launch: the addresses are known and the data is ready.
struct CopyArgs {
  std::int32_t first[kMaxLaunchRanks + 1];  // copies [first[y], first[y + 1]) are made by blocks (x, y)
  Copy copies[kMaxCopies];
};
static_assert(sizeof(CopyArgs) <= kSmallArgs, "the arguments are to fit for every driver");

// The bytes that a rank gives to one peer, and the memory for those that it takes from that peer.
struct Exchange {
  const char* give;
  char* take;
  std::uint64_t give_bytes, take_bytes;
};

// all_gather, broadcast, gather, scatter, all_to_all and barrier where pointers of the peers are not known at launch.
//   exchange of a rank with itself  its own part, copied here unless it is in place (equal addresses); only take_bytes
//                                   counts
//   all_to_all                      every give_bytes and take_bytes is set: the ranks compare them
// RankArgs::input and output are `visible` only where parts are even and lie one after the other (input of scatter and
// all_to_all, output of all_gather, gather and all_to_all), and where every peer has mapped the arena.
template <int kMaxExchanges>
struct ExchangeArgsOf {
  Op op;
  DType dtype;
  Algorithm algorithm;
  std::uint8_t unused;
  std::int32_t root;
  std::int32_t num_ranks;     // of this launch
  std::int32_t same_for_all;  // each rank gives one piece to every peer: it is staged once
  std::uint64_t signed_count;
  std::uint64_t timeout_ns;
  Layout layout;
  RankArgs ranks[kMaxLaunchRanks];
  Exchange exchanges[kMaxExchanges];  // [y * world_size + peer] of the rank in ranks[y]
};
inline constexpr int kUsualExchanges = 104;  // as many as fit into kSmallArgs, for whole ranks of 8
using ExchangeArgs = ExchangeArgsOf<kUsualExchanges>;
static_assert(sizeof(ExchangeArgs) <= kSmallArgs, "the arguments are to fit for every driver");
// For several ranks of one launch in a large communicator.
using ManyExchangeArgs = ExchangeArgsOf<kMaxLaunchRanks * kMaxRanks>;
static_assert(sizeof(ManyExchangeArgs) <= kLargeArgs, "the arguments are larger than any driver takes");
// The same on all ranks of a communicator, because launches of one call need equal grids, and so the same kernel.
constexpr bool needs_many_exchanges(int ranks_of_a_device, int world_size) {
  return ranks_of_a_device * world_size > kUsualExchanges;
}

// Sends and receives of one rank: grid (most channels of a transfer, num_transfers). Messages of one peer in one
// direction keep their order: the blocks of the first of them serve them all. All others are independent. A receive
// takes the oldest message on its link, whose tag, type and count must match.
inline constexpr int kMaxTransfers = 64;
struct Transfer {
  char* data;
  std::uint64_t nbytes;
  std::uint64_t count;
  Location at;  // of `data`, for the peer
  std::int32_t tag;
  std::int16_t peer;
  std::int8_t channels;  // that share it; follows from the size, so it is the same at both ends
  bool sends;
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
static_assert(sizeof(TransferArgs) <= kSmallArgs, "the arguments are to fit for every driver");
static_assert(kMaxTransfers >= 2 * (kMaxRanks - 1), "a launch has room for a message of every link");

}  // namespace ringcomm::cuda
