// The layout of one rank's shared segment. Every flag in it is written by the rank that owns the segment, except
// `attached`, `abort`, `doorbell`, `sleepers`, `abort_state` and `decider`, which are counters or claims that every
// rank changes atomically.
//
//   Control | board | p2p boards, one per destination
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/link.h"

namespace ringcomm::cpu {

inline constexpr std::uint64_t kMagic = 0x72696e67636f6d32;  // "ringcom2"
inline constexpr int kMaxWorldSize = 256;
inline constexpr std::uint64_t kDepth = 8;  // slots of the board
inline constexpr std::uint64_t kLag = 4;    // tickets that a rank publishes ahead of those it consumes
static_assert(kDepth >= kLag + 2, "a rank that runs kLag tickets ahead would wait for credit in a circle");
inline constexpr std::uint64_t kP2pDepth = 8;
inline constexpr int kMaxArenas = 64;
inline constexpr std::uint64_t kLoggedCalls = 64;

// A collective that the rank has begun. The peers compare `hash` while they wait, and read the rest once a call of the
// same number differs.
struct alignas(kLineBytes) LoggedCall {
  Flag hash;  // of the signature, with the number + 1 in the low 16 bits; written last
  Signature signature;
  std::int64_t step;  // of the user's training; below 0: unknown
  Flag has_site;      // `site` has been written
  char site[72];
};
static_assert(sizeof(LoggedCall) == kLineBytes, "a logged call is one line");

// The reason for which the communicator has ended: one for all ranks, in the segment of rank 0.
struct alignas(kLineBytes) AbortState {
  Flag state;  // 0; kWritten; or kWriters + the rank that is writing it
  std::uint32_t code;
  char reason[4096];
};
inline constexpr std::uint64_t kWritten = 1, kWriters = 2;

// A rank's entries for the agreement on the ranks that continue; see Group::agree_on_shrink. Rounds count from 1.
// Odd and even rounds use different memory, so the data of round n is valid until its rank enters round n + 2, which
// readers check.
struct alignas(kLineBytes) ShrinkBoard {
  Flag round;  // the last round that it has entered
  struct {
    std::uint64_t round;
    std::uint64_t members[kMaxWorldSize / 64];  // its proposal, one bit per rank
    std::uint32_t nbytes;
    char payload[1024];
  } entries[2];  // by round modulo 2
};

struct alignas(kLineBytes) Control {
  std::uint64_t magic, nonce;
  std::int32_t rank, world_size;
  std::uint64_t graph_nonce;  // of the wait graph's page of its process
  std::int32_t graph_fd;
  FlagLine attached;      // ranks that have mapped this segment
  FlagLine has_attached;  // 1: this rank has mapped the peers' segments and counted in their `attached`
  FlagLine consumed;      // tickets of the peers' boards that this rank has read
  FlagLine calls;         // number of collectives that this rank has begun
  FlagLine ended;         // number of collectives that this rank has ended
  FlagLine left;          // time at which this rank closed the communicator, in ns; 0: it is open
  FlagLine in_place;      // 1: this rank accesses the peers' buffers
  FlagLine waiting;       // rank + 1 of the peer of this rank's long wait; 0: none
  FlagLine party;         // this rank's record in the wait graph; see PartyPlace
  FlagLine sleepers;      // threads asleep on a flag of this segment
  FlagLine doorbell;      // rung by a rank that changes a p2p flag that this rank watches
  FlagLine bell_sleepers;
  FlagLine abort;                // 1: the communicator has ended
  LoggedCall log[kLoggedCalls];  // by number of the call
  AbortState abort_state;        // on rank 0: the one for all ranks
  FlagLine decider;              // on rank 0: round << 16 | rank + 1 of the rank whose `members` are valid
  ShrinkBoard shrink;
  // The costs of this rank's reads of rank p's slots (SlotCosts): of collectives, and of messages.
  alignas(kLineBytes) Flag read_costs[kMaxWorldSize][2], p2p_read_costs[kMaxWorldSize][2];
  FlagLine p2p_consumed[kMaxWorldSize];  // by source
  struct {
    std::uint64_t nbytes;
    std::int32_t fd;
  } arenas[kMaxArenas];  // memory that the peers may open
};
static_assert(std::is_trivially_copyable_v<Control>, "it begins as zeros");

struct SegmentLayout {
  std::size_t slot_bytes, p2p_slot_bytes;
  int world_size;

  Board board(char* segment) const { return Board::at(segment + board_offset(), kDepth, slot_bytes); }
  Board p2p_board(char* segment, int destination) const {
    return Board::at(segment + p2p_offset(destination), kP2pDepth, p2p_slot_bytes);
  }
  std::size_t nbytes() const { return p2p_offset(world_size); }

 private:
  static constexpr std::size_t kPage = 4096;
  static std::size_t board_offset() { return round_up(sizeof(Control), kPage); }
  std::size_t p2p_offset(int destination) const {
    return board_offset() + round_up(Board::at(nullptr, kDepth, slot_bytes).nbytes(), kPage) +
           destination * round_up(Board::at(nullptr, kP2pDepth, p2p_slot_bytes).nbytes(), kPage);
  }
};

}  // namespace ringcomm::cpu
