// The link protocol: how a message passes from the rank that writes it to those that read it.
//
// Every rank owns a board in memory that its peers can read: `depth` headers, and an area for payloads. What it
// publishes is numbered by tickets; all ranks of a communicator count the same tickets, because a call takes the same
// number of them everywhere. Ticket t has header t mod depth, which says where in the area its payload lies.
//
//   writer                                     reader
//   credit: every reader's consumed > t-depth
//   write payload(t), header(t)
//   header(t).flag = t+1      (release)  --->  header(t).flag > t         (acquire)
//                                              read payload(t)
//   consumed > t              (acquire)  <---  consumed = t+1             (release)
//
// Payloads of at most `slot_bytes` follow each other round the area, which has room for depth + 1 of them, so that one
// is overwritten only after its ticket had been consumed. A writer thus comes back to a line late: on a CPU the line
// has left the caches of writer and reader by then, and rewriting it costs no invalidation. Tiny payloads stay in a
// place of their own by the header, where warm lines are worth more.
//
// A wait goes through a Waiter, which bounds it: it watches the group's abort flag and the call's deadline. On the
// host it throws; on a device it returns false, and the whole block returns together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/sync.h"
#include "core/types.h"

namespace ringcomm {

inline constexpr std::size_t kTinyBytes = 2048;  // a payload of at most this stays by its header
inline constexpr std::size_t kLineBytes = 128;   // two cache lines: the adjacent-line prefetcher pairs them

struct alignas(kLineBytes) FlagLine {
  Flag value;
};

// A count that stands for parts of different sizes has this bit, and a hash of the sizes (none for all_to_all, whose
// sizes no rank knows all of).
inline constexpr std::uint64_t kUneven = 1ull << 63;

// What a call is, as far as all ranks must agree on it. The root and algorithm are part of it, addresses are not.
struct Signature {
  std::uint64_t sequence;  // number of the call on this communicator
  std::uint64_t history;   // hash of the signatures of all calls before
  std::uint64_t count;     // elements of the message
  std::uint8_t op, dtype, reduce_op, algorithm;
  std::int32_t root;

  RINGCOMM_HD bool operator==(const Signature& other) const {
    return sequence == other.sequence && history == other.history && count == other.count && op == other.op &&
           dtype == other.dtype && reduce_op == other.reduce_op && algorithm == other.algorithm && root == other.root;
  }
  // The history of a rank that has made this call: two ranks that differed once differ from then on.
  RINGCOMM_HD std::uint64_t hash() const {
    std::uint64_t h = history + 0x9e3779b97f4a7c15u;
    const std::uint64_t kinds = op | dtype << 8 | reduce_op << 16 | static_cast<std::uint64_t>(algorithm) << 24 |
                                static_cast<std::uint64_t>(static_cast<std::uint32_t>(root)) << 32;
    for (std::uint64_t word : {count, kinds}) {
      h = (h ^ word) * 0xbf58476d1ce4e5b9u;
      h ^= h >> 31;
    }
    return h;
  }
};

// Where a rank's buffer lies, for peers that can reach it: `where` is an address in the shared address space
// (arena < 0) or an offset into one of the rank's arenas.
struct Location {
  std::int32_t arena;
  std::int32_t visible;  // 0: private memory
  std::uint64_t where;
};

struct alignas(kLineBytes) SlotHeader {
  Flag flag;               // ticket + 1 once the payload is there
  std::uint32_t offset;    // of the payload in the area
  std::uint32_t streamed;  // the payload was written past the caches
  Signature signature;     // valid on the first ticket of a call, as are the following
  double factor;           // premul_sum
  Location input, output;
  std::uint64_t part_bytes;  // uneven all_to_all: of the part for this reader
};
static_assert(sizeof(SlotHeader) == kLineBytes, "a slot header is one line");

struct Board {
  SlotHeader* headers = nullptr;
  char* area = nullptr;
  std::uint64_t depth = 0;
  std::size_t slot_bytes = 0;  // most of one payload; a multiple of kLineBytes

  RINGCOMM_HD SlotHeader* header(std::uint64_t ticket) const { return &headers[ticket % depth]; }
  RINGCOMM_HD char* payload(std::uint64_t ticket) const { return area + header(ticket)->offset; }
  // On a device every ticket has its place: nobody looks it up, and the area is `depth` slots.
  RINGCOMM_HD char* slot(std::uint64_t ticket) const { return area + ticket % depth * slot_bytes; }
  RINGCOMM_HD std::size_t tiny_bytes() const { return depth * (kTinyBytes + kLineBytes); }
  RINGCOMM_HD std::size_t area_bytes() const { return tiny_bytes() + (depth + 1) * slot_bytes; }
  RINGCOMM_HD std::size_t nbytes() const { return depth * sizeof(SlotHeader) + area_bytes(); }

  // Board at `memory`; its writer and its readers see the same one.
  RINGCOMM_HD static Board at(char* memory, std::uint64_t depth, std::size_t slot_bytes) {
    return {reinterpret_cast<SlotHeader*>(memory), memory + depth * sizeof(SlotHeader), depth, slot_bytes};
  }

  // The writer, holding credit for `ticket`, takes the next `nbytes` (<= slot_bytes) of the area for its payload.
  RINGCOMM_HD char* open(std::uint64_t ticket, std::size_t nbytes, std::size_t& cursor) const {
    const std::size_t taken = round_up(nbytes, kLineBytes);
    if (nbytes <= kTinyBytes) {  // an odd number of lines apart: not all in one set of the cache
      header(ticket)->offset = static_cast<std::uint32_t>(ticket % depth) * (kTinyBytes + kLineBytes);
      return payload(ticket);
    }
    if (cursor < tiny_bytes() || cursor + taken > area_bytes()) cursor = tiny_bytes();
    header(ticket)->offset = static_cast<std::uint32_t>(cursor);
    cursor += taken;
    return payload(ticket);
  }
};

// The value `consumed` must reach before ticket t may be written.
RINGCOMM_HD constexpr std::uint64_t credit_needed(std::uint64_t ticket, std::uint64_t depth) {
  return ticket + 1 > depth ? ticket + 1 - depth : 0;
}

template <typename Waiter>
RINGCOMM_HD bool wait_published(const Board& board, std::uint64_t ticket, Waiter&& waiter) {
  return waiter(&board.header(ticket)->flag, ticket + 1);
}
template <typename Waiter>
RINGCOMM_HD bool wait_credit(const Flag* consumed, std::uint64_t ticket, std::uint64_t depth, Waiter&& waiter) {
  return waiter(consumed, credit_needed(ticket, depth));
}

}  // namespace ringcomm
