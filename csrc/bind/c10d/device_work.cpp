#include "bind/c10d/device_work.h"

#include <c10/core/StreamGuard.h>

#include <thread>

namespace ringcomm {

void DeviceLink::check(const char* call) const {
  if (C10_LIKELY(!engine->aborted())) return;
  engine->synchronize(0);  // throws a more precise error
  fail(ErrorCode::kAborted, call, ": rank ", engine->rank(), " expected a working communicator on ", device,
       ", got one that was aborted; make a new process group");
}

void CallTensors::release() {
  if (!released_.exchange(true)) tensors_.clear();
}

bool DeviceWork::isCompleted() {
  if (succeeded_ || in_flight_->captured) return true;
  const bool failed = link_->engine->aborted();
  if (!in_flight_->ended()) return failed;
  if (!failed) succeeded_ = true;
  return true;
}

std::exception_ptr DeviceWork::exception() const {
  if (succeeded_) return nullptr;
  try {
    link_->check(call_);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  const c10::Stream current = link_->streams->current();
  const std::int64_t limit_ms = engine_timeout(timeout);
  if ((limit_ms > 0 || blocks_host_) && !link_->streams->capturing(current)) wait_on_host(limit_ms);
  if (!succeeded_) link_->check(call_);
  if (in_flight_->end) in_flight_->end->block(current);
  in_flight_->release();
  return true;
}

// The engine limits every call by the call's own time limit; the limit given here ends the wait only.
void DeviceWork::wait_on_host(std::int64_t limit_ms) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::milliseconds(limit_ms);
  for (int look = 0; !isCompleted(); ++look) {
    if (limit_ms > 0 && Clock::now() >= deadline) {
      fail(ErrorCode::kTimeout, call_, ": rank ", rank_, " expected the call to end within ", limit_ms,
           " ms, got no end; it stays in flight: wait longer, or abort the process group");
    }
    if (look < 100)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// The future is complete from the start; only the streams that use its values must wait. The future arranges this wait
// when it is completed while the call's stream is the current one. Calls that were made in between are waited for too.
c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (future_) return future_;
  const bool on_host = link_->device.is_cpu();
  future_ = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::ofTensors(), on_host ? std::vector<c10::Device>() : std::vector<c10::Device>{link_->device});
  if (auto error = exception()) {
    future_->setError(std::move(error));
  } else {
    const c10::StreamGuard guard(stream_);
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

}  // namespace ringcomm
