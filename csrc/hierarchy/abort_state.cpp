#include "hierarchy/abort_state.h"

#include <chrono>
#include <thread>

#include "core/error.h"

namespace ringcomm::hierarchy {

namespace {

// Appends the advice, which a reason that is another rank's error already contains.
std::string with_advice(const std::string& reason) {
  const char* const advice = "create a new communicator";
  return reason.find(advice) == std::string::npos ? concat(reason, "; ", advice) : reason;
}

}  // namespace

void AbortState::record(const std::string& reason, ErrorCode code) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!reason_.empty()) return;
  reason_ = reason.empty() ? "no reason given" : reason;
  code_ = code;
}

bool AbortState::ended() const {
  if (local_->aborted()) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  return !reason_.empty();
}

std::string AbortState::why() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!reason_.empty()) return reason_;
  }
  return local_->why_aborted();  // may wait for the reason
}

ErrorCode AbortState::code() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_.empty() ? local_->aborted_as() : code_;
}

void AbortState::check(Op op) const {
  if (!ended()) return;
  const std::string reason = why();  // called first: it waits until the reason is known
  if (code() != ErrorCode::kAborted) fail(code(), with_advice(reason));
  fail(ErrorCode::kAborted, name(op), ": ", who_,
       " expected a working communicator, got one that was aborted: ", with_advice(reason));
}

void AbortState::await() const {
  constexpr int kLooks = 100;
  for (int i = 0; i < kLooks && !ended() && !closing_.load(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

void AbortState::explain(Op op, const std::exception_ptr& error) const {
  try {
    std::rethrow_exception(error);
  } catch (const Error& each) {
    if (each.code() != ErrorCode::kAborted && each.code() != ErrorCode::kRankLost) return;
  } catch (...) {
    return;
  }
  await();
  check(op);
}

}  // namespace ringcomm::hierarchy
