// The layout of one rank's shared segment. Every flag in it is written by the rank that owns the segment, except
// `attached`, `abort`, `doorbell` and `sleepers`, which are counters or claims that anyone changes atomically.
//
//   Control | board | p2p boards, one per destination
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/link.h"

namespace ringcomm::cpu {

inline constexpr std::uint64_t kMagic = 0x72696e67636f6d32;  // "ringcom2"
inline constexpr int kMaxWorldSize = 256;
inline constexpr std::uint64_t kDepth = 8;  // slots of the board
inline constexpr std::uint64_t kLag = 4;    // tickets that a walk publishes ahead of what it consumes
static_assert(kDepth >= kLag + 2, "a walk that runs kLag tickets ahead would wait for credit in a circle");
inline constexpr std::uint64_t kP2pDepth = 8;
inline constexpr int kMaxArenas = 64;
inline constexpr std::uint64_t kLoggedCalls = 64;

struct ArenaRecord {
  std::uint64_t nbytes;
  std::int32_t fd;
};

struct alignas(kLineBytes) Control {
  std::uint64_t magic, nonce;
  std::int32_t rank, world_size;
  FlagLine attached;  // peers that have mapped this segment
  FlagLine consumed;  // tickets of the peers' boards that this rank has read
  FlagLine calls;     // collectives that this rank has begun
  FlagLine sleepers;  // threads asleep on a flag of this segment
  FlagLine doorbell;  // rung by whoever changes a p2p flag that this rank watches
  FlagLine bell_sleepers;
  FlagLine abort;          // 0, 1 while the reason is being written, 2
  Flag log[kLoggedCalls];  // by number of the call: the low 16 bits of the number + 1, and a hash of the signature
  char reason[1024];
  FlagLine wants_streaming[kMaxWorldSize / 64];  // bit p: rank p should write its slots past the caches
  FlagLine p2p_consumed[kMaxWorldSize];          // by source
  ArenaRecord arenas[kMaxArenas];
};

struct SegmentLayout {
  std::size_t slot_bytes, p2p_slot_bytes;
  int world_size;

  Board board(char* segment) const { return Board::at(segment + board_offset(), kDepth, slot_bytes); }
  Board p2p_board(char* segment, int destination) const {
    return Board::at(segment + p2p_offset(destination), kP2pDepth, p2p_slot_bytes);
  }
  std::size_t nbytes() const { return p2p_offset(world_size); }

 private:
  static std::size_t board_offset() { return round_page(sizeof(Control)); }
  std::size_t p2p_offset(int destination) const {
    return board_offset() + round_page(Board::at(nullptr, kDepth, slot_bytes).nbytes()) +
           destination * round_page(Board::at(nullptr, kP2pDepth, p2p_slot_bytes).nbytes());
  }
  static std::size_t round_page(std::size_t n) { return (n + 4095) / 4096 * 4096; }
};

}  // namespace ringcomm::cpu
