// One call's use of the boards: its tickets, credits, checks of the first ticket, and buffer locations.
#pragma once

#include <vector>

#include "cpu/collectives/streaming.h"
#include "cpu/group/state.h"
#include "runtime/observe/trace.h"

namespace ringcomm::cpu {

inline constexpr std::size_t kAlignBytes = 64;  // slices and shards begin at a cache line

// The state that a rank keeps from call to call.
struct Progress {
  explicit Progress(int world_size) : seen_consumed(world_size, 0), reading(world_size), mapped(world_size, false) {}

  std::uint64_t ticket = 0;    // the next ticket
  std::size_t cursor = 0;      // position in the area of this rank's board
  std::uint64_t sequence = 0;  // number of calls made
  std::uint64_t history = 0;   // hash of these calls
  std::vector<std::uint64_t> seen_consumed;
  std::vector<SlotReading> reading;  // by the rank that wrote the slot
  SlotWriting writing;
  std::vector<bool> mapped;  // by rank: this process has all pages of its board's area
};

class SlotStream {
 public:
  SlotStream(Group& group, Progress& progress, const Call& call);

  // Indices i count the tickets of this call from 0.
  // Waits for credit, and returns memory for the payload of ticket i.
  char* open(std::uint64_t i, std::size_t nbytes);
  char* slot(std::uint64_t i) const { return board_.payload(base_ + i); }
  // After await(peer, i).
  const char* slot_of(int peer, std::uint64_t i) {
    const Board board = group_.board(peer);
    if (!progress_.mapped[peer] && !board.is_tiny(base_ + i)) map_area(peer);
    return board.payload(base_ + i);
  }
  // Waits until ticket i may be written: every peer has read the previous ticket in its header.
  void wait_credit(std::uint64_t i);
  // slot <- data, with streaming stores if they were chosen when the slot was opened.
  void write(std::uint64_t i, void* slot, const void* data, std::size_t nbytes);
  bool streams(std::size_t nbytes) const { return streaming_ && nbytes >= kLeastStreamedBytes; }
  void publish(std::uint64_t i);
  void await(int peer, std::uint64_t i);
  void await_all(std::uint64_t i);
  // Runs `read`, which reads `nbytes` from the given peers' slots of ticket i, and records how long it took, in equal
  // shares.
  template <typename Read>
  void metered(int first_peer, int last_peer, std::uint64_t i, std::size_t nbytes, const Read& read);
  // Marks ticket i of all peers, and all tickets before it, as read by this rank.
  void release(std::uint64_t i) {
    const auto probe = this->probe(trace::SpanKind::kRelease, -1, i);
    group_.post(&group_.control().consumed.value, base_ + i + 1);
  }
  // Ends the call, which has used `tickets` tickets.
  void finish(std::uint64_t tickets);

  // Returns a probe, which traces as long as it lives.
  trace::Probe probe(trace::SpanKind kind, int peer, std::uint64_t i, std::int64_t nbytes = -1) const {
    return trace::Probe(kind, peer, number(i), nbytes);
  }
  // The number of ticket i among all tickets of the communicator.
  std::int64_t number(std::uint64_t i) const { return static_cast<std::int64_t>(base_ + i); }

  // Sets the locations of this rank's buffers, which are sent with ticket 0.
  void set_buffers(const Location& input, const Location& output);
  const SlotHeader& header_of(int peer) const { return *group_.board(peer).header(base_); }
  // premul_sum: the factor of every rank, valid once ticket 0 of every peer has arrived.
  const double* factors() const { return factors_; }

  const Call& call() const { return *deadline_.call; }
  const Signature& signature() const { return signature_; }
  std::size_t element() const { return element_; }  // bytes of an element of the call
  Group& group() const { return group_; }
  int rank() const { return group_.rank(); }
  int world_size() const { return group_.world_size(); }

 private:
  std::size_t message_bytes() const { return call().count * element_; }
  void wait_credit_from(int peer, std::uint64_t i);
  void map_area(int peer);
  bool was_streamed(int peer, std::uint64_t i) const { return group_.board(peer).header(base_ + i)->streamed; }
  bool measures_read(int first_peer, int last_peer, std::uint64_t i, std::size_t nbytes) {
    bool measures = false;
    for (int p = first_peer; p < last_peer && nbytes >= kLeastStreamedBytes; ++p)
      if (p != group_.rank()) measures |= progress_.reading[p].measures(was_streamed(p, i), nbytes);
    return measures;
  }
  void record_read(int peer, std::uint64_t i, std::size_t nbytes, std::int64_t ns);
  void check_signature(int peer);

  Group& group_;
  Progress& progress_;
  const Board& board_;
  const Deadline deadline_;
  const std::size_t element_;
  const std::uint64_t base_;
  const Signature signature_;
  Location input_{-1, 0, 0}, output_{-1, 0, 0};
  SlotCosts told_;          // the costs that the slowest reader of this rank's slots has reported
  bool streaming_ = false;  // the slot that was opened last
  bool published_ = false;
  std::uint64_t checked_[kMaxWorldSize / 64] = {};
  int num_checked_ = 0;
  double factors_[kMaxWorldSize];
};

template <typename Read>
void SlotStream::metered(int first_peer, int last_peer, std::uint64_t i, std::size_t nbytes, const Read& read) {
  const bool one = first_peer + 1 == last_peer;
  const auto probe =
      this->probe(one ? trace::SpanKind::kRead : trace::SpanKind::kReduce, one ? first_peer : -1, i, nbytes);
  if (!measures_read(first_peer, last_peer, i, nbytes)) return read();
  const std::int64_t ns = ns_of(read);
  const std::int64_t peers = last_peer - first_peer - (first_peer <= group_.rank() && group_.rank() < last_peer);
  for (int p = first_peer; p < last_peer; ++p)
    if (p != group_.rank()) record_read(p, i, nbytes, ns / peers);
}

}  // namespace ringcomm::cpu
