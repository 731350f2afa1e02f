#include "cuda/streams/status.h"

#include "core/call/check.h"
#include "core/call/parts.h"

namespace ringcomm::cuda {

std::string seconds(std::int64_t timeout_ms) { return concat(static_cast<double>(timeout_ms) / 1000.0, " s"); }

namespace {

// Describes what a rank expected of its peer.
std::string expected(const Status& status) {
  switch (static_cast<WaitKind>(status.wait)) {
    case WaitKind::kSlice:
      return concat("rank ", status.peer, " to pass on its slices");
    case WaitKind::kCredit:
      return concat("rank ", status.peer, " to make room for more slices");
    case WaitKind::kPublished:
      return concat("rank ", status.peer, " to come to this call");
    case WaitKind::kBarrier:
      return concat("rank ", status.peer, " to finish its part");
    case WaitKind::kPackets:
      return concat("packets of rank ", status.peer);
    case WaitKind::kMessage:
      return concat("rank ", status.peer, " to send");
    default:
      return concat("rank ", status.peer);
  }
}
std::string position(const Status& status) {
  const std::string flag = static_cast<WaitKind>(status.wait) == WaitKind::kPackets
                               ? std::string()
                               : concat(", flag at ", status.seen, " of ", status.expected);
  return concat(" (channel ", status.channel, ", its call #", status.calls, flag, ')');
}

Error mismatch(const Status& status, int rank, const std::string& calls) {
  const Signature &mine = status.mine, &theirs = status.theirs;
  if (mine == theirs)
    return {ErrorCode::kMismatch, concat(calls, ": rank ", rank, " expected the visible buffer of rank ", status.peer,
                                         " to be mapped here, got none; allocate it with the communicator on every "
                                         "rank",
                                         kAdvice)};
  if (static_cast<Op>(mine.op) == Op::kSend)
    return {ErrorCode::kMismatch, concat("recv: rank ", rank, " expected ", describe(mine), " from rank ", status.peer,
                                         ", got ", describe(theirs),
                                         "; between processes, sends and receives of two ranks must pair up in order, "
                                         "with equal tags and sizes",
                                         kAdvice)};
  Signature alike = theirs;
  alike.count = mine.count;
  if (static_cast<Op>(mine.op) == Op::kAllToAll && alike == mine && (mine.count & theirs.count & kUneven))
    return {ErrorCode::kMismatch,
            concat(other_counts(mine.root, rank, mine.count & ~kUneven, status.peer, theirs.count & ~kUneven, "bytes"),
                   kAdvice)};
  const bool earlier = mine.history != theirs.history || mine.sequence != theirs.sequence;
  return {ErrorCode::kMismatch, concat(name(static_cast<Op>(mine.op)), ": rank ", rank, " called #", mine.sequence, " ",
                                       describe(mine), ", rank ", status.peer, " called #", theirs.sequence, " ",
                                       describe(theirs), earlier ? " (and an earlier call differed)" : "",
                                       "; every rank must make the same calls in the same order", kAdvice)};
}

}  // namespace

Error explain(const Status& status, int rank, const std::string& calls, std::int64_t timeout_ms) {
  switch (static_cast<Failure>(status.code)) {
    case Failure::kMismatch:
      return mismatch(status, rank, calls);
    case Failure::kTimeout:
      return {ErrorCode::kTimeout, concat(calls, ": rank ", rank, " expected ", expected(status), " within ",
                                          seconds(timeout_ms), ", got no answer", position(status),
                                          "; see whether it has stalled or calls something else", kAdvice)};
    default:
      return {ErrorCode::kAborted,
              concat(calls, ": rank ", rank, " expected ", expected(status), ", got an abort by a rank that gave up",
                     position(status), "; see the errors of the other ranks", kAdvice)};
  }
}

bool AbortState::record(const std::string& reason, ErrorCode code) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ended_.load(std::memory_order_relaxed)) return false;
  const std::size_t end = reason.rfind(kAdvice);  // goes with what is raised
  reason_ = reason.substr(0, end);
  code_ = code;
  ended_.store(true, std::memory_order_release);
  return true;
}

std::string AbortState::why() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

ErrorCode AbortState::code() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return code_;
}

void AbortState::raise(Op op, int rank) const {
  if (code() != ErrorCode::kAborted) fail(code(), why(), kAdvice);
  fail(ErrorCode::kAborted, name(op), ": rank ", rank, " expected an open communicator, got an abort: ", why(),
       kAdvice);
}

}  // namespace ringcomm::cuda
