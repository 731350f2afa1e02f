#include "cpu/collectives/slot_stream.h"

#include <algorithm>

#include "core/call/signature.h"
#include "core/error.h"
#include "cpu/kernels/loops.h"
#include "runtime/shared_memory.h"

namespace ringcomm::cpu {

SlotStream::SlotStream(Group& group, Progress& progress, const Call& call)
    : group_(group),
      progress_(progress),
      board_(group.board(group.rank())),
      deadline_(group.deadline(call)),
      element_(element_bytes(call.dtype)),
      base_(progress.ticket),
      signature_(signature_of(call, group.world_size(), progress.sequence, progress.history)) {
  factors_[group.rank()] = call.factor;
  group.begin_call(call, signature_);
  static_assert(sizeof(Control::read_costs[0]) == kCostClasses * sizeof(Flag), "a word for each class");
  if (message_bytes() < kLeastStreamedBytes) return;
  for (int p = 0; p < group.world_size(); ++p) {
    const Flag* told = &group.control(p).read_costs[group.rank()][cost_class(message_bytes())];
    const SlotCosts costs = SlotCosts::unpacked(load_relaxed(told));
    told_ = {std::max(told_.cached, costs.cached), std::max(told_.streamed, costs.streamed)};
  }
}

void SlotStream::wait_credit(std::uint64_t i) {
  for (int peer = 0; peer < group_.world_size(); ++peer)
    if (peer != group_.rank()) wait_credit_from(peer, i);
}

char* SlotStream::open(std::uint64_t i, std::size_t nbytes) {
  wait_credit(i);
  streaming_ = nbytes >= kLeastStreamedBytes && progress_.writing.next(message_bytes(), told_);
  board_.header(base_ + i)->streamed = streaming_;
  char* const payload = board_.open(base_ + i, nbytes, progress_.cursor);
  if (!progress_.mapped[group_.rank()] && !board_.is_tiny(base_ + i)) map_area(group_.rank());
  return payload;
}

// With the first payload in the area: a rank that sends none needs no pages for it. Its writer comes first, so that the
// pages lie in its own part of the memory.
void SlotStream::map_area(int peer) {
  const Board board = group_.board(peer);
  map_pages(board.area + board.tiny_bytes(), board.area_bytes() - board.tiny_bytes(), peer == group_.rank());
  progress_.mapped[peer] = true;
}

void SlotStream::wait_credit_from(int peer, std::uint64_t i) {
  const std::uint64_t needed = credit_needed(base_ + i, board_.depth);
  std::uint64_t& seen = progress_.seen_consumed[peer];
  if (seen >= needed) return;
  const auto probe = this->probe(trace::SpanKind::kWaitCredit, peer, i);
  const Flag* consumed = &group_.control(peer).consumed.value;
  group_.wait(peer, consumed, needed, deadline_);
  seen = load_acquire(consumed);
}

void SlotStream::set_buffers(const Location& input, const Location& output) {
  input_ = input;
  output_ = output;
}

void SlotStream::write(std::uint64_t i, void* slot, const void* data, std::size_t nbytes) {
  const auto probe = this->probe(trace::SpanKind::kWrite, -1, i, nbytes);
  const bool streaming = streams(nbytes);
  if (nbytes < kLeastStreamedBytes || !progress_.writing.measures(streaming, nbytes))
    return kernels().copy(slot, data, nbytes, streaming);
  const std::int64_t ns = ns_of([&] { kernels().copy(slot, data, nbytes, streaming); });
  progress_.writing.record(message_bytes(), streaming, nbytes, ns);
}

void SlotStream::record_read(int peer, std::uint64_t i, std::size_t nbytes, std::int64_t ns) {
  progress_.reading[peer].record(message_bytes(), was_streamed(peer, i), nbytes, ns, group_.control().read_costs[peer]);
}

void SlotStream::publish(std::uint64_t i) {
  const auto probe = this->probe(trace::SpanKind::kPublish, -1, i);
  SlotHeader* header = board_.header(base_ + i);
  if (!published_) {
    published_ = true;
    header->signature = signature_;
    header->factor = call().factor;
    header->input = input_;
    header->output = output_;
  }
  drain_streaming_stores();
  group_.post(&header->flag, base_ + i + 1);
}

void SlotStream::await(int peer, std::uint64_t i) {
  const auto probe = this->probe(trace::SpanKind::kWaitTicket, peer, i);
  group_.wait(peer, &group_.board(peer).header(base_ + i)->flag, base_ + i + 1, deadline_);
  std::uint64_t& word = checked_[peer / 64];
  const std::uint64_t bit = 1ull << (peer % 64);
  if (word & bit) return;
  word |= bit;
  ++num_checked_;
  check_signature(peer);
  factors_[peer] = header_of(peer).factor;
  if (progress_.seen_consumed[peer] < base_)
    progress_.seen_consumed[peer] = base_;  // the peer has begun this call, so it has ended the one before
}

void SlotStream::await_all(std::uint64_t i) {
  for (int peer = 0; peer < group_.world_size(); ++peer)
    if (peer != group_.rank()) await(peer, i);
}

void SlotStream::check_signature(int peer) {
  if (!(header_of(peer).signature == signature_)) group_.report_mismatch();
}

void SlotStream::finish(std::uint64_t tickets) {
  if (num_checked_ + 1 < group_.world_size()) group_.compare_calls();  // with peers that it did not wait for
  progress_.ticket = base_ + tickets;
  ++progress_.sequence;
  progress_.history = signature_.hash();
  group_.end_call();
  group_.post(&group_.control().consumed.value, progress_.ticket);
}

}  // namespace ringcomm::cpu
