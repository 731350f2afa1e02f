#include "cuda/launch/local_group.h"

#include <algorithm>

#include "core/algorithm_counts.h"
#include "core/call/signature.h"
#include "cuda/launch/builder.h"
#include "cuda/launch/context.h"

namespace ringcomm::cuda {

// One call of all ranks of the group, which is launched when all have made it.
class LocalGroup::PendingLaunch final : public PendingCall {
 public:
  PendingLaunch(LocalGroup& group, std::uint64_t number, std::size_t num_slots)
      : number(number), batches(num_slots), local_group_(group) {}

  bool cancel() override { return local_group_.cancel(*this); }
  std::string missing() const override { return local_group_.missing(*this); }
  bool has(std::size_t slot) const { return batches[slot].num_calls != 0; }
  bool full() const { return come == batches.size(); }

  const std::uint64_t number;
  std::vector<Batch> batches;  // by slot
  std::size_t come = 0;

 private:
  LocalGroup& local_group_;
};

namespace {

bool alike(const Batch& a, const Batch& b, int world_size) {
  if (a.num_calls != b.num_calls) return false;
  for (int i = 0; i < a.num_calls; ++i)
    if (!(signature_of(a.calls[i], world_size) == signature_of(b.calls[i], world_size))) return false;
  return true;
}
std::string describe_batch(const Batch& batch, int world_size) {
  const std::string text = describe(batch.first(), world_size);
  return batch.num_calls == 1 ? text : concat("a list of ", batch.num_calls, ", first ", text);
}

}  // namespace

LocalGroup::LocalGroup(AbortState& abort_state, std::vector<int> ranks) : abort_state_(abort_state) {
  for (const int rank : ranks) slots_.push_back({rank, nullptr, 0, {}, false});
}

void LocalGroup::join(Context& context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  slot_of(context.rank()).context = &context;
}

void LocalGroup::leave(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  RankSlot& slot = slot_of(rank);
  slot.context = nullptr;
  slot.left = true;
}

LocalGroup::RankSlot& LocalGroup::slot_of(int rank) {
  return *std::find_if(slots_.begin(), slots_.end(), [rank](const RankSlot& slot) { return slot.rank == rank; });
}

StreamEventPtr LocalGroup::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return latest_.eager();
}

void LocalGroup::check_mismatch(RankSlot& slot) {
  if (!mismatch_ || slot.calls > mismatch_number_) return;
  ++slot.calls;
  std::rethrow_exception(mismatch_);
}
void LocalGroup::check_mismatch(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_mismatch(slot_of(rank));
}

std::shared_ptr<PendingCall> LocalGroup::post(Context& context, Batch batch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  RankSlot& slot = slot_of(context.rank());
  check_mismatch(slot);
  abort_state_.check(batch.first().op, context.rank());
  const std::size_t ahead = slot.calls - first_open_;
  if (ahead == open_.size()) open_.push_back(std::make_shared<PendingLaunch>(*this, slot.calls, slots_.size()));
  const std::shared_ptr<PendingLaunch> pending = open_[ahead];
  if (!pending->open()) return pending;  // a rank has given up, and its call is gone
  slot.last.op = batch.first().op;
  slot.last.dtype = batch.first().dtype;
  slot.last.count = batch.first().count;
  ++slot.calls;
  pending->batches[&slot - slots_.data()] = std::move(batch);
  Batch& mine = pending->batches[&slot - slots_.data()];
  if (!mine.kept.empty()) mine.calls = mine.kept.data();
  ++pending->come;
  compare(*pending, slot);
  if (pending->open() && pending->full())
    launch(*pending, slot);
  else if (!mine.kept.empty())  // its stream goes on before the launch
    mine.ready = context.events().record(mine.stream, mine.capture, context.rank());
  return pending;
}

// Whether this rank makes the same call as the first one.
void LocalGroup::compare(const PendingLaunch& pending, const RankSlot& slot) {
  const std::size_t mine = &slot - slots_.data();
  std::size_t other = 0;
  while (other < slots_.size() && (other == mine || !pending.has(other))) ++other;
  if (other == slots_.size()) return;
  const int world_size = slot.context->world_size();
  const Batch &a = pending.batches[mine], &b = pending.batches[other];
  if (alike(a, b, world_size)) return;
  const Error error(ErrorCode::kMismatch, concat(name(a.first().op), ": rank ", slot.rank, " called #", pending.number,
                                                 " ", describe_batch(a, world_size), ", rank ", slots_[other].rank,
                                                 " called #", pending.number, " ", describe_batch(b, world_size),
                                                 "; every rank must make the same calls in the same order", kAdvice));
  mismatch_ = std::make_exception_ptr(error);
  mismatch_number_ = pending.number;
  fail_open(mismatch_);
  throw error;
}

// Errors of the caller leave the communicator unchanged, because nothing has been launched.
void LocalGroup::launch(PendingLaunch& pending, RankSlot& slot) {
  const std::shared_ptr<PendingLaunch> kept = open_.front();
  open_.pop_front();
  ++first_open_;
  try {
    enqueue(pending, &slot - slots_.data());
  } catch (const Error& error) {
    pending.fail(std::current_exception());
    if (error.code() != ErrorCode::kInvalid && error.code() != ErrorCode::kUnsupported) throw;
  }
}

void LocalGroup::enqueue(PendingLaunch& pending, std::size_t lead) {
  const Batch& mine = pending.batches[lead];
  Context& context = *slots_[lead].context;
  std::vector<LaunchMember> members;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Batch& batch = pending.batches[i];
    members.push_back({slots_[i].rank, slots_[i].context, &batch});
    if (batch.capture != mine.capture)
      fail(ErrorCode::kInvalid, name(mine.first().op), ": rank ", context.rank(),
           " expected the ranks of this device in one and the same graph capture, got rank ", slots_[i].rank,
           " outside of it; capture the calls of all of them from one thread, on streams forked from one");
  }
  LaunchBuilder builder(members, lead, pending.number);
  for (const LaunchMember& member : members) member.context->peer_memory().attend(name(mine.first().op));
  builder.agree();
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Batch& batch = pending.batches[i];
    if (batch.stream == mine.stream) continue;
    const StreamEventPtr ready =
        batch.ready ? batch.ready : context.events().record(batch.stream, batch.capture, members[i].rank);
    StreamEvents::follow(mine.stream, mine.capture, ready, context.rank());
  }
  latest_.follow(mine.stream, mine.capture, context.rank());
  const auto put_end = [&] {
    const StreamEventPtr end = context.events().record(mine.stream, mine.capture, context.rank());
    latest_.put(end);
    return end;
  };
  bool waits = false;
  try {
    waits = builder.enqueue();
  } catch (const Error&) {
    try {
      put_end();  // a part may be enqueued: close() waits for it
    } catch (const Error&) {
      // the stream takes no more: the first error says why
    }
    throw;
  }
  for (const LaunchMember& member : members) member.context->peer_memory().called();
  const StreamEventPtr end = put_end();
  for (const LaunchMember& member : members) {
    if (waits) member.context->calls(mine.first().op, member.batch->limit_ms);
    if (mine.capture) member.context->captured.store(true);
    const Call& call = member.batch->first();
    count_algorithm(member.context->algorithm_counts.get(), call.op, call.algorithm, builder.algorithm(),
                    member.batch->num_calls);
  }
  pending.enqueued(end, waits);
}

bool LocalGroup::cancel(PendingLaunch& pending) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!pending.open()) return false;
  pending.fail(nullptr);
  return true;
}

std::string LocalGroup::missing(const PendingLaunch& pending) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (pending.has(i)) continue;
    const RankSlot& slot = slots_[i];
    text += concat(text.empty() ? "" : "; ", "rank ", slot.rank, " to make call #", pending.number, ", got ");
    if (slot.left)
      text += concat("it closed after ", slot.calls, " calls");
    else if (slot.calls == 0)
      text += "no call from it";
    else
      text += concat("only #", slot.calls - 1, " ", describe(slot.last, 1));
  }
  return text;
}

void LocalGroup::fail_open(std::exception_ptr error) {
  for (const auto& pending : open_)
    if (pending->open()) pending->fail(error);
}

void LocalGroup::end_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  fail_open(nullptr);
}

}  // namespace ringcomm::cuda
