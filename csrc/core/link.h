// The link protocol: how a message passes from the rank that writes it to the ranks that read it.
//
// Every rank owns a board in memory that its peers can read: `depth` headers, and an area for payloads. Each payload
// that it publishes has a ticket number. All ranks of a communicator count the same tickets, because a call takes the
// same number of them on every rank. Ticket t uses header t mod depth, which tells where in the area its payload lies.
//
//   writer                                     reader
//   credit: every reader's consumed > t-depth
//   write payload(t), header(t)
//   header(t).flag = t+1      (release)  --->  header(t).flag > t         (acquire)
//                                              read payload(t)
//   consumed > t              (acquire)  <---  consumed = t+1             (release)
//
// Payloads of at most `slot_bytes` follow each other round the area, which has room for depth + 1 of them, so that a
// payload is overwritten only after its ticket has been consumed. A writer therefore reuses a line late: on a CPU the
// line has left the caches of writer and reader by then, and rewriting it causes no invalidation. Tiny payloads have a
// fixed place by the header, where lines that stay in the cache are faster.
//
// Every wait is bounded: it checks the group's abort flag and the call's deadline. On the host it throws; on a device
// it returns false, and the whole block returns together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "core/sync.h"
#include "core/types.h"

namespace ringcomm {

inline constexpr std::size_t kTinyBytes = 2048;  // largest payload that is stored by its header
inline constexpr std::size_t kLineBytes = 128;   // two cache lines: the adjacent-line prefetcher pairs them

struct alignas(kLineBytes) FlagLine {
  Flag value;
};

// This bit marks a count that stands for parts of different sizes; the other bits are a hash of the sizes (0 for
// all_to_all, where no rank knows all sizes).
inline constexpr std::uint64_t kUneven = 1ull << 63;

// The properties of a call that all ranks must agree on. Root and algorithm are included, addresses are not.
struct Signature {
  std::uint64_t sequence;  // number of the call on this communicator
  std::uint64_t history;   // hash of the signatures of all earlier calls
  std::uint64_t count;     // elements of the message
  std::uint8_t op, dtype, reduce_op, algorithm;
  std::int32_t root;

  RINGCOMM_HD bool operator==(const Signature& other) const {
    return sequence == other.sequence && history == other.history && count == other.count && op == other.op &&
           dtype == other.dtype && reduce_op == other.reduce_op && algorithm == other.algorithm && root == other.root;
  }
  // Returns the history after this call. Two ranks whose calls have differed once have different histories from then
  // on.
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

// The location of a rank's buffer, for peers that can access it: `where` is an address in the shared address space
// (arena < 0) or an offset into one of the rank's arenas.
struct Location {
  std::int32_t arena;
  std::int32_t visible;  // 0: private memory, which peers cannot access
  std::uint64_t where;
};

struct alignas(kLineBytes) SlotHeader {
  Flag flag;               // ticket + 1 once the payload is written
  std::uint32_t offset;    // of the payload within the area
  std::uint32_t streamed;  // the payload was written with streaming stores
  Signature signature;     // valid on a call's first ticket, as are the next fields
  double factor;           // premul_sum
  Location input, output;
  std::uint64_t part_bytes;  // uneven all_to_all: size of the part for this reader
};
static_assert(sizeof(SlotHeader) == kLineBytes, "a slot header is one line");

struct Board {
  SlotHeader* headers = nullptr;
  char* area = nullptr;
  std::uint64_t depth = 0;
  std::size_t slot_bytes = 0;  // largest payload; a multiple of kLineBytes

  RINGCOMM_HD SlotHeader* header(std::uint64_t ticket) const { return &headers[ticket % depth]; }
  RINGCOMM_HD char* payload(std::uint64_t ticket) const { return area + header(ticket)->offset; }
  // On a device a ticket's place follows from its number: no offset is read, and the area is `depth` slots.
  RINGCOMM_HD char* slot(std::uint64_t ticket) const { return area + ticket % depth * slot_bytes; }
  // Whether the payload lies by its header.
  RINGCOMM_HD bool is_tiny(std::uint64_t ticket) const { return header(ticket)->offset < tiny_bytes(); }
  RINGCOMM_HD std::size_t tiny_bytes() const { return depth * (kTinyBytes + kLineBytes); }
  RINGCOMM_HD std::size_t area_bytes() const { return tiny_bytes() + (depth + 1) * slot_bytes; }
  RINGCOMM_HD std::size_t nbytes() const { return depth * sizeof(SlotHeader) + area_bytes(); }

  // Returns the board at `memory`; the writer and its readers see the same board.
  RINGCOMM_HD static Board at(char* memory, std::uint64_t depth, std::size_t slot_bytes) {
    return {reinterpret_cast<SlotHeader*>(memory), memory + depth * sizeof(SlotHeader), depth, slot_bytes};
  }

  // The writer, which has credit for `ticket`, takes the next `nbytes` (<= slot_bytes) of the area for its payload.
  RINGCOMM_HD char* open(std::uint64_t ticket, std::size_t nbytes, std::size_t& cursor) const {
    const std::size_t taken = round_up(nbytes, kLineBytes);
    if (nbytes <= kTinyBytes) {  // an odd number of lines apart, to use several sets of the cache
      header(ticket)->offset = static_cast<std::uint32_t>(ticket % depth) * (kTinyBytes + kLineBytes);
      return payload(ticket);
    }
    if (cursor < tiny_bytes() || cursor + taken > area_bytes()) cursor = tiny_bytes();
    header(ticket)->offset = static_cast<std::uint32_t>(cursor);
    cursor += taken;
    return payload(ticket);
  }
};

// The value that `consumed` must reach before ticket t may be written.
RINGCOMM_HD constexpr std::uint64_t credit_needed(std::uint64_t ticket, std::uint64_t depth) {
  return ticket + 1 > depth ? ticket + 1 - depth : 0;
}

}  // namespace ringcomm
