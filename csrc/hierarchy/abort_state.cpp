#include "hierarchy/abort_state.h"

#include <chrono>
#include <thread>

#include "core/error.h"

namespace ringcomm::hosts {

namespace {

// Appends the advice, which a reason that is another rank's error already contains.
std::string with_advice(const std::string& reason) {
  const char* const advice = "create a new communicator";
  return reason.find(advice) == std::string::npos ? concat(reason, "; ", advice) : reason;
}

}  // namespace

void Fate::seal(const std::string& reason, ErrorCode code) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!reason_.empty()) return;
  reason_ = reason.empty() ? "no reason given" : reason;
  code_ = code;
}

bool Fate::ended() const {
  if (local_->aborted()) return true;
  const std::lock_guard<std::mutex> lock(mutex_);
  return !reason_.empty();
}

std::string Fate::why() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!reason_.empty()) return reason_;
  }
  return local_->why_aborted();  // may wait for the reason
}

ErrorCode Fate::code() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_.empty() ? local_->aborted_as() : code_;
}

void Fate::check(Op op) const {
  if (!ended()) return;
  const std::string reason = why();  // called first: it waits until the reason is known
  if (code() != ErrorCode::kAborted) fail(code(), with_advice(reason));
  fail(ErrorCode::kAborted, name(op), ": ", who_,
       " expected a working communicator, got one that was aborted: ", with_advice(reason));
}

void Fate::await() const {
  constexpr int kLooks = 100;
  for (int i = 0; i < kLooks && !ended() && !closing_.load(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

void Fate::explain(Op op, const Error& error) const {
  if (error.code() != ErrorCode::kAborted && error.code() != ErrorCode::kRankLost) return;
  await();
  check(op);
}

void Told::wait(std::int64_t timeout_ms) {
  try {
    message_->wait(timeout_ms);
  } catch (const Error& error) {
    fate_->explain(op_, error);
    throw;
  }
}

void Told::on_done(std::function<void(std::exception_ptr)> callback) {
  message_->on_done([fate = fate_, op = op_, callback = std::move(callback)](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Error& each) {
      try {
        fate->explain(op, each);
      } catch (...) {
        error = std::current_exception();
      }
    } catch (...) {
    }
    callback(error);
  });
}

}  // namespace ringcomm::hosts
