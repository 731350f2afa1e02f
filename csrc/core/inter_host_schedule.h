// The schedules between hosts: which member sends which chunks to which member in which round. A message is cut into
// one chunk for each of the `members` (one rank of every host). The first half of the rounds reduces and leaves every
// member with one complete chunk, the second half gathers. Every schedule moves (m-1)/m of the message each way in each
// half, which no schedule can beat (Patarasuk & Yuan 2009). They differ in the number of rounds, in the partners, and
// in the order of a sum:
//
//   ring        2(m-1) rounds, two neighbours       chunk c in the order c+1, c+2, ..., c
//   butterfly   2 log2(m) rounds, log2(m) partners  the balanced tree over the members; m a power of two
//   direct      2 rounds, all the others            any tree: the owner of a chunk has every addend of it at once
//
// These are pure functions that are proven at compile time; the engine over hosts, the simulator and the documents use
// them. Source of the butterfly: Rabenseifner 2004, ICCS (recursive halving and doubling).
#pragma once

#include "core/schedule.h"

namespace ringcomm {

enum class InterHostSchedule : std::uint8_t { kRing, kButterfly, kDirect };
// A schedule as an algorithm, which has its name and is counted.
constexpr Algorithm algorithm_of(InterHostSchedule kind) {
  return kind == InterHostSchedule::kRing        ? Algorithm::kRing
         : kind == InterHostSchedule::kButterfly ? Algorithm::kButterfly
                                                 : Algorithm::kDirect;
}
inline const char* name(InterHostSchedule kind) { return name(algorithm_of(kind)); }

RINGCOMM_HD constexpr bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }
RINGCOMM_HD constexpr int bits_of(int n) {  // for a power of two
  int bits = 0;
  while (1 << bits < n) ++bits;
  return bits;
}

// Chunks [first, last), to or from a member.
struct Hop {
  int peer;
  int first, last;
};

// A butterfly halves the range of chunks that a member works on in every round; its low bit selects the first half.
RINGCOMM_HD constexpr int butterfly_first(int member, int bits, int round) {
  int first = 0;
  for (int k = 0; k < round; ++k) first |= (member >> k & 1) << (bits - 1 - k);
  return first;
}

RINGCOMM_HD constexpr int num_rounds(InterHostSchedule kind, int members) {
  if (members == 1) return 0;
  return kind == InterHostSchedule::kRing        ? 2 * (members - 1)
         : kind == InterHostSchedule::kButterfly ? 2 * bits_of(members)
                                                 : 2;
}
RINGCOMM_HD constexpr int reducing_rounds(InterHostSchedule kind, int members) { return num_rounds(kind, members) / 2; }
// The number of messages that a member sends in a round; it receives as many.
RINGCOMM_HD constexpr int num_hops(InterHostSchedule kind, int members) {
  return kind == InterHostSchedule::kDirect ? members - 1 : 1;
}
// The chunk that a member has complete between the halves; and the member that has a given chunk complete.
RINGCOMM_HD constexpr int owned_chunk(InterHostSchedule kind, int members, int member) {
  return kind == InterHostSchedule::kButterfly ? butterfly_first(member, bits_of(members), bits_of(members)) : member;
}
RINGCOMM_HD constexpr int owner_of_chunk(InterHostSchedule kind, int members, int chunk) {
  return owned_chunk(kind, members, chunk);  // reversing bits is its own inverse
}

RINGCOMM_HD constexpr Hop sent(InterHostSchedule kind, int members, int member, int round, int i) {
  const int half = num_rounds(kind, members) / 2;
  const bool reduces = round < half;
  if (kind == InterHostSchedule::kRing) {
    const int chunk = ring_step(member, members, round).send_chunk;
    return {ring_next(member, members), chunk, chunk + 1};
  }
  if (kind == InterHostSchedule::kDirect) {
    const int peer = member + 1 + i < members ? member + 1 + i : member + 1 + i - members;
    const int chunk = reduces ? peer : member;
    return {peer, chunk, chunk + 1};
  }
  const int level = reduces ? round : 2 * half - 1 - round, peer = member ^ (1 << level);
  const int first = butterfly_first(reduces ? peer : member, half, level + 1);
  return {peer, first, first + (members >> (level + 1))};
}
RINGCOMM_HD constexpr Hop received(InterHostSchedule kind, int members, int member, int round, int i) {
  const int half = num_rounds(kind, members) / 2;
  const bool reduces = round < half;
  if (kind == InterHostSchedule::kRing) {
    const int chunk = ring_step(member, members, round).recv_chunk;
    return {ring_prev(member, members), chunk, chunk + 1};
  }
  if (kind == InterHostSchedule::kDirect) {
    const int peer = member - 1 - i >= 0 ? member - 1 - i : member - 1 - i + members;
    const int chunk = reduces ? member : peer;
    return {peer, chunk, chunk + 1};
  }
  const int level = reduces ? round : 2 * half - 1 - round, peer = member ^ (1 << level);
  const int first = butterfly_first(reduces ? member : peer, half, level + 1);
  return {peer, first, first + (members >> (level + 1))};
}

// How a message between hosts is cut: `slots` windows are in flight at once, and a chunk is cut into one slice for each
// slot, but into slices of at least `least` and at most `most` bytes.
struct SliceSizes {
  std::size_t most, least;
  int slots;
};
inline constexpr SliceSizes kSlicing{512 << 10, 64 << 10, 4};

// Cuts a message of `count` elements into windows of `chunks` chunks.
constexpr WindowCut cut_between(std::size_t count, int chunks, const SliceSizes& slicing, std::size_t element,
                                std::size_t align) {
  const std::size_t chunk = ceil_div(count, static_cast<std::size_t>(chunks)) * element;
  const std::size_t wanted = ceil_div(chunk, static_cast<std::size_t>(slicing.slots));
  const std::size_t slice = smaller(slicing.most, larger(slicing.least, wanted));
  return cut_windows(count, chunks, larger(1, slice / element), align);
}

// Visits the rounds of a message that is cut into windows, each with `rounds` rounds: up to `slots` windows are in
// flight at once, so that one is combined while the next is on the wire.
template <typename Visit>
void interleave(std::size_t windows, int rounds, int slots, Visit&& visit) {
  for (std::size_t first = 0; first < windows; first += static_cast<std::size_t>(slots))
    for (int round = 0; round < rounds; ++round)
      for (std::size_t w = first; w < smaller(windows, first + static_cast<std::size_t>(slots)); ++w) visit(w, round);
}

// Whether the received part is the first operand of a combine, and the local part the second.
RINGCOMM_HD constexpr bool received_first(InterHostSchedule kind, int member, int peer) {
  return kind == InterHostSchedule::kRing || peer < member;
}

// The position of a member on the way of an undivided message from `root` along the ring to the member before it.
RINGCOMM_HD constexpr int chain_position(int members, int member, int root) {
  return ring_distance(root, member, members);
}

namespace proof {  // on bit masks of contributions: no member is counted twice, and all chunks become complete

constexpr bool exchange_is_complete(InterHostSchedule kind, int members) {
  unsigned has[kMaxWorldSize][kMaxWorldSize] = {};  // has[member][chunk]: members already summed in
  unsigned next[kMaxWorldSize][kMaxWorldSize] = {};
  const unsigned all = (1u << members) - 1;
  for (int m = 0; m < members; ++m)
    for (int c = 0; c < members; ++c) next[m][c] = has[m][c] = 1u << m;
  const int rounds = num_rounds(kind, members), half = reducing_rounds(kind, members);
  for (int round = 0; round < rounds; ++round) {
    for (int m = 0; m < members; ++m)
      for (int i = 0; i < num_hops(kind, members); ++i) {
        const Hop in = received(kind, members, m, round, i), out = sent(kind, members, in.peer, round, i);
        if (out.peer != m || in.first != out.first || in.last != out.last) return false;
        for (int c = in.first; c < in.last; ++c) {
          if (round < half && (next[m][c] & has[in.peer][c])) return false;
          next[m][c] = round < half ? next[m][c] | has[in.peer][c] : has[in.peer][c];
        }
      }
    for (int m = 0; m < members; ++m)
      for (int c = 0; c < members; ++c) has[m][c] = next[m][c];
    if (round == half - 1)
      for (int m = 0; m < members; ++m) {
        const int mine = owned_chunk(kind, members, m);
        if (has[m][mine] != all || owner_of_chunk(kind, members, mine) != m) return false;
      }
  }
  for (int m = 0; m < members; ++m)
    for (int c = 0; c < members; ++c)
      if (has[m][c] != all) return false;
  return true;
}
constexpr bool exchanges_are_complete_up_to(int n) {
  for (int m = 1; m <= n; ++m) {
    if (!exchange_is_complete(InterHostSchedule::kRing, m) || !exchange_is_complete(InterHostSchedule::kDirect, m))
      return false;
    if (is_power_of_two(m) && !exchange_is_complete(InterHostSchedule::kButterfly, m)) return false;
  }
  return true;
}
static_assert(exchanges_are_complete_up_to(kMaxWorldSize), "sent() and received() are not an all-reduce");

}  // namespace proof
}  // namespace ringcomm
