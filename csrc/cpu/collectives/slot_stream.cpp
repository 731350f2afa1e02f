#include "cpu/collectives/slot_stream.h"

#include "core/error.h"
#include "cpu/kernels/loops.h"

namespace ringcomm::cpu {

SlotStream::SlotStream(Group& group, Progress& progress, const Call& call, std::size_t agreed_count)
    : group_(group),
      progress_(progress),
      board_(group.board(group.rank())),
      deadline_(group.deadline(call)),
      base_(progress.ticket) {
  signature_ = {progress.sequence,
                progress.history,
                agreed_count,
                static_cast<std::uint8_t>(call.op),
                static_cast<std::uint8_t>(call.dtype),
                static_cast<std::uint8_t>(call.reduce_op),
                static_cast<std::uint8_t>(call.algorithm),
                call.root};
  factors_[group.rank()] = call.factor;
  group.begin_call(call, signature_);
  if (message_bytes() < RateMeter::kLeastBytes) return;
  for (int p = 0; p < group.world_size() && !someone_wants_streaming_; ++p)
    someone_wants_streaming_ =
        load_relaxed(&group.control(p).wants_streaming[group.rank() / 64].value) >> (group.rank() % 64) & 1;
}

void SlotStream::wait_credit(std::uint64_t i) {
  for (int peer = 0; peer < group_.world_size(); ++peer)
    if (peer != group_.rank()) wait_credit_from(peer, i);
}

char* SlotStream::open(std::uint64_t i, std::size_t nbytes) {
  wait_credit(i);
  board_.header(base_ + i)->streamed = 0;
  return board_.open(base_ + i, nbytes, progress_.cursor);
}

void SlotStream::wait_credit_from(int peer, std::uint64_t i) {
  const std::uint64_t needed = credit_needed(base_ + i, board_.depth);
  std::uint64_t& seen = progress_.seen_consumed[peer];
  if (seen >= needed) return;
  const auto probe = this->probe(trace::What::kWaitCredit, peer, i);
  const Flag* consumed = &group_.control(peer).consumed.value;
  group_.wait(peer, consumed, needed, deadline_);
  seen = load_acquire(consumed);
}

void SlotStream::set_buffers(const Location& input, const Location& output) {
  input_ = input;
  output_ = output;
}

bool SlotStream::streams(std::uint64_t i, std::size_t nbytes) const {
  const bool wanted = someone_wants_streaming_ || progress_.writing.wants_streaming();
  return wanted && nbytes >= RateMeter::kLeastBytes && (base_ + i) % kProbeInterval != 0;
}

void SlotStream::write(std::uint64_t i, void* slot, const void* data, std::size_t nbytes) {
  const auto probe = this->probe(trace::What::kWrite, -1, i, nbytes);
  const bool streaming = streams(i, nbytes);
  if (streaming || !is_measured(base_ + i, nbytes)) {
    board_.header(base_ + i)->streamed |= streaming;
    return kernels().copy(slot, data, nbytes, streaming);
  }
  const auto begin = Clock::now();
  kernels().copy(slot, data, nbytes, false);
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
  progress_.writing.record(nbytes, ns, message_bytes());
}

void SlotStream::record_read(int peer, std::uint64_t i, std::size_t nbytes, std::int64_t ns) {
  if (group_.board(peer).header(base_ + i)->streamed) return;
  RateMeter& meter = progress_.meters[peer];
  const bool before = meter.wants_streaming();
  meter.record(nbytes, ns, message_bytes());
  if (meter.wants_streaming() != before) flip(&group_.control().wants_streaming[peer / 64].value, 1ull << (peer % 64));
}

void SlotStream::publish(std::uint64_t i) {
  const auto probe = this->probe(trace::What::kPublish, -1, i);
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
  const auto probe = this->probe(trace::What::kWaitTicket, peer, i);
  wait_published(group_.board(peer), base_ + i, [&](const Flag* flag, std::uint64_t target) {
    group_.wait(peer, flag, target, deadline_);
    return true;
  });
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
