#include "cuda/streams/pending_call.h"

#include <sched.h>

namespace ringcomm::cuda {

namespace {
constexpr int kYields = 64;  // ranks as threads come a few microseconds apart: as long as a thread needs to wake up
}

void PendingCall::settle(State state) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_.store(state, std::memory_order_release);
  }
  settled_.notify_all();
}

void PendingCall::enqueued(StreamEventPtr end, bool waits_for_ranks) {
  end_event_ = std::move(end);
  waits_for_ranks_ = waits_for_ranks;
  settle(kEnqueued);
}

void PendingCall::fail(std::exception_ptr error) {
  error_ = std::move(error);
  settle(kFailed);
}

bool PendingCall::await(Clock::time_point end) const {
  for (int i = 0; i < kYields && open(); ++i) sched_yield();
  if (!open()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  return settled_.wait_until(lock, end, [this] { return !open(); });
}

}  // namespace ringcomm::cuda
