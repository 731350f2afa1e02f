#include "cuda/launch/team.h"

#include <algorithm>

#include "core/check.h"
#include "core/parts.h"
#include "cuda/launch/context.h"
#include "cuda/launch/prepare.h"

namespace ringcomm::cuda {

// One call of all ranks of the team.
class Team::Round final : public Outcome {
 public:
  Round(Team& team, std::uint64_t number, std::size_t num_seats) : number(number), batches(num_seats), team_(team) {}

  bool cancel() override { return team_.cancel(*this); }
  std::string missing() const override { return team_.missing(*this); }
  bool has(std::size_t seat) const { return batches[seat].num_calls != 0; }
  bool full() const { return come == batches.size(); }

  const std::uint64_t number;
  std::vector<Batch> batches;  // by seat
  std::size_t come = 0;

 private:
  Team& team_;
};

namespace {

bool alike(const Call& a, const Call& b, int world_size) {
  return a.op == b.op && a.dtype == b.dtype && a.algorithm == b.algorithm &&
         (!reduces(a.op) || a.reduce_op == b.reduce_op) && (!rooted(a.op) || a.root == b.root) &&
         agreed_count(a, world_size) == agreed_count(b, world_size);
}
bool alike(const Batch& a, const Batch& b, int world_size) {
  if (a.num_calls != b.num_calls) return false;
  for (int i = 0; i < a.num_calls; ++i)
    if (!alike(a.calls[i], b.calls[i], world_size)) return false;
  return true;
}
std::string describe_batch(const Batch& batch, int world_size) {
  const std::string text = describe(batch.first(), world_size);
  return batch.num_calls == 1 ? text : concat("a list of ", batch.num_calls, ", first ", text);
}

}  // namespace

Team::Team(AbortState& abort_state, std::vector<int> ranks) : abort_state_(abort_state) {
  for (const int rank : ranks) seats_.push_back({rank, nullptr, 0, {}, false});
}

void Team::join(Context& context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  seat_of(context.rank()).context = &context;
}

void Team::leave(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Seat& seat = seat_of(rank);
  seat.context = nullptr;
  seat.left = true;
}

Team::Seat& Team::seat_of(int rank) {
  return *std::find_if(seats_.begin(), seats_.end(), [rank](const Seat& seat) { return seat.rank == rank; });
}

MarkPtr Team::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return newest_.eager();
}

void Team::check_mismatch(Seat& seat) {
  if (!mismatch_ || seat.calls > mismatch_round_) return;
  ++seat.calls;
  std::rethrow_exception(mismatch_);
}
void Team::check_mismatch(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_mismatch(seat_of(rank));
}

std::shared_ptr<Outcome> Team::post(Context& context, Batch batch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Seat& seat = seat_of(context.rank());
  check_mismatch(seat);
  abort_state_.check(batch.first().op, context.rank());
  const std::size_t ahead = seat.calls - first_open_;
  if (ahead == open_.size()) open_.push_back(std::make_shared<Round>(*this, seat.calls, seats_.size()));
  const std::shared_ptr<Round> round = open_[ahead];
  if (!round->open()) return round;  // a rank has given up, and its call is gone
  seat.last.op = batch.first().op;
  seat.last.dtype = batch.first().dtype;
  seat.last.count = batch.first().count;
  ++seat.calls;
  round->batches[&seat - seats_.data()] = std::move(batch);
  Batch& mine = round->batches[&seat - seats_.data()];
  if (!mine.kept.empty()) mine.calls = mine.kept.data();
  ++round->come;
  compare(*round, seat);
  if (round->open() && round->full())
    launch(*round, seat);
  else if (!mine.kept.empty())  // its stream goes on before the launch
    mine.ready = context.marks().record(mine.stream, mine.capture, context.rank());
  return round;
}

// Whether this rank makes the same call as the first one.
void Team::compare(const Round& round, const Seat& seat) {
  const std::size_t mine = &seat - seats_.data();
  std::size_t other = 0;
  while (other < seats_.size() && (other == mine || !round.has(other))) ++other;
  if (other == seats_.size()) return;
  const int world_size = seat.context->world_size();
  const Batch &a = round.batches[mine], &b = round.batches[other];
  if (alike(a, b, world_size)) return;
  const Error error(ErrorCode::kMismatch, concat(name(a.first().op), ": rank ", seat.rank, " called #", round.number,
                                                 " ", describe_batch(a, world_size), ", rank ", seats_[other].rank,
                                                 " called #", round.number, " ", describe_batch(b, world_size),
                                                 "; every rank must make the same calls in the same order", kAdvice));
  mismatch_ = std::make_exception_ptr(error);
  mismatch_round_ = round.number;
  fail_open(mismatch_);
  throw error;
}

// Errors of the caller leave the communicator unchanged, because nothing has been launched.
void Team::launch(Round& round, Seat& seat) {
  const std::shared_ptr<Round> kept = open_.front();
  open_.pop_front();
  ++first_open_;
  try {
    enqueue(round, &seat - seats_.data());
  } catch (const Error& error) {
    round.fail(std::current_exception());
    if (error.code() != ErrorCode::kInvalid && error.code() != ErrorCode::kUnsupported) throw;
  }
}

void Team::enqueue(Round& round, std::size_t lead) {
  const Batch& mine = round.batches[lead];
  Context& context = *seats_[lead].context;
  std::vector<Row> rows;
  for (std::size_t i = 0; i < seats_.size(); ++i) {
    const Batch& batch = round.batches[i];
    rows.push_back({seats_[i].rank, seats_[i].context, &batch});
    if (batch.capture != mine.capture)
      fail(ErrorCode::kInvalid, name(mine.first().op), ": rank ", context.rank(),
           " expected the ranks of this device in one and the same graph capture, got rank ", seats_[i].rank,
           " outside of it; capture the calls of all of them from one thread, on streams forked from one");
  }
  Preparation preparation(rows, lead, round.number);
  for (const Row& row : rows) row.context->group().attend(name(mine.first().op));
  preparation.agree();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Batch& batch = round.batches[i];
    if (batch.stream == mine.stream) continue;
    const MarkPtr ready = batch.ready ? batch.ready : context.marks().record(batch.stream, batch.capture, rows[i].rank);
    Marks::follow(mine.stream, mine.capture, ready, context.rank());
  }
  newest_.follow(mine.stream, mine.capture, context.rank());
  const auto put_end = [&] {
    const MarkPtr end = context.marks().record(mine.stream, mine.capture, context.rank());
    newest_.put(end);
    return end;
  };
  bool waits = false;
  try {
    waits = preparation.enqueue();
  } catch (const Error&) {
    try {
      put_end();  // a part may be enqueued: close() waits for it
    } catch (const Error&) {
      // the stream takes no more: the first error says why
    }
    throw;
  }
  for (const Row& row : rows) row.context->group().called();
  const MarkPtr end = put_end();
  for (const Row& row : rows) {
    if (waits) row.context->calls(mine.first().op, row.batch->limit_ms);
    if (mine.capture) row.context->captured.store(true);
  }
  round.enqueued(end, waits);
}

bool Team::cancel(Round& round) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!round.open()) return false;
  round.fail(nullptr);
  return true;
}

std::string Team::missing(const Round& round) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (std::size_t i = 0; i < seats_.size(); ++i) {
    if (round.has(i)) continue;
    const Seat& seat = seats_[i];
    text += concat(text.empty() ? "" : "; ", "rank ", seat.rank, " to make call #", round.number, ", got ");
    if (seat.left)
      text += concat("it closed after ", seat.calls, " calls");
    else if (seat.calls == 0)
      text += "no call from it";
    else
      text += concat("only #", seat.calls - 1, " ", describe(seat.last, 1));
  }
  return text;
}

void Team::fail_open(std::exception_ptr error) {
  for (const auto& round : open_)
    if (round->open()) round->fail(error);
}

void Team::end_all() {
  const std::lock_guard<std::mutex> lock(mutex_);
  fail_open(nullptr);
}

}  // namespace ringcomm::cuda
