#include "hierarchy/nccl/request.h"

#include <sched.h>
#include <unistd.h>

#include "core/call/check.h"
#include "core/error.h"

namespace ringcomm::nccl {

namespace {
constexpr int kYields = 32;
constexpr auto kForEver = TransportClock::time_point::max();
}  // namespace

StreamEventPtr TransportRequest::event() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return event_;
}

void TransportRequest::enqueued(StreamEventPtr event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  event_ = std::move(event);
}

// An abort ends the device's work and its events: only a call that was seen to end before has succeeded.
bool TransportRequest::over() const {
  if (ended_well_.load()) return true;
  const StreamEventPtr end = event();
  try {
    if (end && reached(shared_->place, end) && !shared_->abort_state->is_over()) {
      ended_well_.store(true);
      return true;
    }
  } catch (const Error& error) {
    shared_->abort_state->fail({-1, false, error.what()});
  }
  return shared_->abort_state->is_over();
}

bool TransportRequest::done() const {
  if (hurry_ && !event()) hurry_();
  return over();
}

void TransportRequest::raise() const {
  const std::optional<TransportFailure> failure = shared_->abort_state->failure();
  const int rank = shared_->place.rank;
  if (!failure)
    fail(ErrorCode::kAborted, name(op_), ": rank ", rank,
         " expected a working communicator, got one that was aborted; create a new communicator");
  const std::string whom = failure->peer < 0 ? std::string("the other hosts") : concat("rank ", failure->peer);
  fail(failure->late ? ErrorCode::kTimeout : ErrorCode::kSystem, name(op_), ": rank ", rank, " expected ", whom,
       failure->late ? " to come in time, got no end of " : " to be reached through NCCL, got ", failure->what,
       "; look at what happened there, and create a new communicator");
}

void TransportRequest::wait(std::int64_t timeout_ms) {
  const auto limit = timeout_ms > 0 ? TransportClock::now() + std::chrono::milliseconds(timeout_ms) : kForEver;
  const auto over_or_hurried = [&] {
    if (over()) return true;
    if (hurry_ && !event()) hurry_();
    return false;
  };
  if (!cuda::poll_until(limit, over_or_hurried)) report_in_flight(op_, shared_->place.rank, timeout_ms);
  if (!ended_well_.load()) raise();
}

void TransportRequest::join(std::uintptr_t stream) {
  for (int idle = 0; !event(); ++idle) {
    if (hurry_) hurry_();
    if (shared_->abort_state->is_over()) raise();
    if (idle < kYields)
      sched_yield();
    else
      usleep(50);
  }
  if (shared_->abort_state->is_over() && !ended_well_.load()) raise();
  const DeviceScope on(shared_->place.device, shared_->place.rank);
  shared_->follow(reinterpret_cast<cudaStream_t>(stream), event());
}

std::exception_ptr TransportRequest::result() const {
  if (ended_well_.load()) return nullptr;
  try {
    raise();
  } catch (...) {
    return std::current_exception();
  }
}

void TransportRequest::on_done(std::function<void(std::exception_ptr)> callback) {
  if (over()) return callback(result());
  shared_->watcher->call_back([self = shared_from_this(), callback = std::move(callback)] {
    if (self->hurry_ && !self->event()) self->hurry_();
    if (!self->over()) return false;
    callback(self->result());
    return true;
  });
}

}  // namespace ringcomm::nccl
