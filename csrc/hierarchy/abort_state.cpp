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

void AbortState::check(Op op) const {
  if (!local_->aborted()) return;
  const std::string reason = local_->why_aborted();  // called first: it waits until the reason is known
  const ErrorCode code = local_->aborted_as();
  if (code != ErrorCode::kAborted) fail(code, with_advice(reason));
  fail(ErrorCode::kAborted, name(op), ": ", who_,
       " expected a working communicator, got one that was aborted: ", with_advice(reason));
}

void AbortState::await() const {
  constexpr int kLooks = 100;
  for (int i = 0; i < kLooks && !local_->aborted() && !closing_.load(); ++i)
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
