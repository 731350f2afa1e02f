// A slot stream that writes down what a rank would do to shared memory, step by step, in place of doing it. The
// collectives of the cpu engine are compiled against it, so what is explored is their own order of steps; boards
// and credit are those of core/link.h. SlotStream's part is told again here: see cpu/collectives/slot_stream.cpp.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call/parts.h"
#include "core/link.h"
#include "cpu/collectives/ring.h"
#include "cpu/collectives/staged.h"
#include "cpu/collectives/tuning.h"
#include "cpu/kernels/loops.h"
#include "runtime/observe/trace.h"

namespace ringcomm::cpu {

struct Span {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
};

// One access to memory that several ranks see. A flag is waited for with acquire and stored with release.
struct Access {
  enum Kind : std::uint8_t { kWait, kStore, kRead, kWrite } kind;
  int owner;                   // the rank whose memory it is
  std::uint64_t call;          // in which it is made
  const Flag* flag = nullptr;  // wait, store
  std::uint64_t value = 0;     // of the flag; read, write: the ticket that is read or written
  Span header = {}, payload = {};
  std::uint64_t delta = 0, nbytes = 0;  // read: where in the payload, which only its writer has placed
};

// Payloads are named by rank and ticket while they are recorded; the names look like addresses.
inline constexpr std::uint64_t kNamedBytes = 1 << 20, kNamedTickets = 1 << 10;
inline char* payload_name(int rank, std::uint64_t ticket) {
  return reinterpret_cast<char*>(kNamedBytes * kNamedTickets * (rank + 1u) + kNamedBytes * ticket);
}

// What a rank shares, and what it does in a run.
class Tape {
 public:
  // `area_slot_bytes`: what the board takes for the size of a slot.
  Tape(int rank, int world_size, std::uint64_t depth, std::size_t slot_bytes, std::size_t area_slot_bytes)
      : rank(rank), slot_bytes(slot_bytes), places(kNamedTickets), seen_consumed(world_size, 0) {
    lines_.resize(Board::at(nullptr, depth, area_slot_bytes).nbytes() / sizeof(FlagLine));
    board = Board::at(reinterpret_cast<char*>(lines_.data()), depth, area_slot_bytes);
  }
  Tape(const Tape&) = delete;

  void wait(int owner, const Flag* flag, std::uint64_t target) {
    accesses.push_back({Access::kWait, owner, sequence, flag, target});
  }
  void store(const Flag* flag, std::uint64_t value) {
    accesses.push_back({Access::kStore, rank, sequence, flag, value});
  }
  void write_header(std::uint64_t t) { accesses.push_back({Access::kWrite, rank, sequence, nullptr, t, header(t)}); }
  void read_header(const Tape& peer, std::uint64_t t) {
    accesses.push_back({Access::kRead, peer.rank, sequence, nullptr, t, peer.header(t)});
  }
  // All of the header but its flag.
  Span header(std::uint64_t t) const {
    const auto* begin = reinterpret_cast<const char*>(board.header(t));
    return {begin + sizeof(Flag), begin + sizeof(SlotHeader)};
  }
  // What the kernels touch, if it is a payload.
  void touch(Access::Kind kind, const void* data, std::size_t nbytes) {
    const auto at = reinterpret_cast<std::uint64_t>(data), rank_and_one = at / (kNamedBytes * kNamedTickets);
    if (rank_and_one == 0 || rank_and_one > seen_consumed.size() || nbytes == 0) return;
    const std::uint64_t ticket = at / kNamedBytes % kNamedTickets;
    accesses.push_back(
        {kind, static_cast<int>(rank_and_one) - 1, sequence, nullptr, ticket, {}, {}, at % kNamedBytes, nbytes});
  }

  const int rank;
  const std::size_t slot_bytes;
  Board board;
  FlagLine consumed{}, ended{};
  char input[64] = {};        // of the user
  std::vector<char*> places;  // of this rank's payloads, by ticket
  std::vector<Access> accesses;
  // What a rank carries from call to call.
  std::uint64_t ticket = 0, sequence = 0;
  std::size_t cursor = 0;
  std::vector<std::uint64_t> seen_consumed;

 private:
  std::vector<FlagLine> lines_;
};

inline Tape* recording = nullptr;          // that of the rank that runs
inline std::uint64_t recorded_lag = 0;     // kLag of the world
inline std::uint64_t credit_too_much = 0;  // a fault: slots that a writer takes for free

struct RecordedKernels {
  void copy(void* to, const void* from, std::size_t nbytes, bool) const {
    recording->touch(Access::kRead, from, nbytes);
    recording->touch(Access::kWrite, to, nbytes);
  }
  void reduce(const ReduceArgs& args) const {
    const std::size_t nbytes = args.count * element_bytes(args.dtype);
    for (int p = 0; p < args.ranks; ++p) recording->touch(Access::kRead, args.sources[p], nbytes);
    for (int i = 0; i < args.num_outputs; ++i) recording->touch(Access::kWrite, args.outputs[i], nbytes);
  }
};
inline RecordedKernels recorded_kernels() { return {}; }

class RecordedGroup {
 public:
  explicit RecordedGroup(std::vector<Tape*> tapes) : tapes_(std::move(tapes)) {}
  int rank() const { return recording->rank; }
  int world_size() const { return static_cast<int>(tapes_.size()); }
  std::size_t slot_bytes() const { return recording->slot_bytes; }
  Tape& tape(int peer) const { return *tapes_[peer]; }
  template <typename... Why>
  void fail_group(const Why&...) const {}  // the ranks of a recording agree

 private:
  const std::vector<Tape*> tapes_;
};

class RecordedSlotStream {
 public:
  RecordedSlotStream(RecordedGroup& group, const Call& call)
      : group_(group), call_(call), mine_(*recording), base_(mine_.ticket), checked_(group.world_size(), false) {}

  void wait_credit(std::uint64_t i) {
    for (int peer = 0; peer < group_.world_size(); ++peer) {
      if (peer == mine_.rank) continue;
      std::uint64_t& seen = mine_.seen_consumed[peer];
      const std::uint64_t needed = credit_needed(base_ + i, mine_.board.depth + credit_too_much);
      if (seen >= needed) continue;
      mine_.wait(peer, &group_.tape(peer).consumed.value, needed);
      seen = needed;  // the least that it can have seen
    }
  }
  char* open(std::uint64_t i, std::size_t nbytes) {
    wait_credit(i);
    mine_.write_header(base_ + i);
    mine_.places.at(base_ + i) = mine_.board.open(base_ + i, nbytes, mine_.cursor);
    return slot(i);
  }
  char* slot(std::uint64_t i) const { return payload_name(mine_.rank, base_ + i); }
  const char* slot_of(int peer, std::uint64_t i) const { return payload_name(peer, base_ + i); }
  void write(std::uint64_t, void* slot, const void* data, std::size_t nbytes) {
    recorded_kernels().copy(slot, data, nbytes, false);
  }
  bool streams(std::size_t) const { return false; }
  void publish(std::uint64_t i) {
    if (!published_) mine_.write_header(base_ + i);
    published_ = true;
    mine_.store(&mine_.board.header(base_ + i)->flag, base_ + i + 1);
  }
  void await(int peer, std::uint64_t i) {
    Tape& other = group_.tape(peer);
    mine_.wait(peer, &other.board.header(base_ + i)->flag, base_ + i + 1);
    if (checked_[peer]) return;
    checked_[peer] = true;
    mine_.read_header(other, base_);
    if (mine_.seen_consumed[peer] < base_) mine_.seen_consumed[peer] = base_;
  }
  void await_all(std::uint64_t i) {
    for (int peer = 0; peer < group_.world_size(); ++peer)
      if (peer != mine_.rank) await(peer, i);
  }
  template <typename Read>
  void metered(int, int, std::uint64_t, std::size_t, const Read& read) {
    read();
  }
  void release(std::uint64_t i) { mine_.store(&mine_.consumed.value, base_ + i + 1); }
  // Nothing is traced here.
  trace::Probe probe(trace::SpanKind kind, int, std::uint64_t, std::int64_t = -1) const { return trace::Probe(kind); }
  std::int64_t number(std::uint64_t i) const { return static_cast<std::int64_t>(base_ + i); }
  void finish(std::uint64_t tickets) {
    mine_.ticket = base_ + tickets;
    mine_.store(&mine_.ended.value, mine_.sequence + 1);
    ++mine_.sequence;
    mine_.store(&mine_.consumed.value, mine_.ticket);
  }
  const double* factors() const { return nullptr; }
  const Call& call() const { return call_; }
  std::size_t element() const { return element_bytes(call_.dtype); }
  RecordedGroup& group() const { return group_; }
  int rank() const { return group_.rank(); }
  int world_size() const { return group_.world_size(); }

 private:
  RecordedGroup& group_;
  const Call& call_;
  Tape& mine_;
  const std::uint64_t base_;
  bool published_ = false;
  std::vector<bool> checked_;
};

}  // namespace ringcomm::cpu

// The collectives themselves, on that slot stream: overloads of what the engine has.
#define SlotStream RecordedSlotStream
#define kernels recorded_kernels
#define kLag recorded_lag
#include "cpu/collectives/ring.cpp"
#include "cpu/collectives/staged.cpp"
#undef SlotStream
#undef kernels
#undef kLag
