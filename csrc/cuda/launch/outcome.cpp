#include "cuda/launch/outcome.h"

#include <sched.h>

namespace ringcomm::cuda {

namespace {
constexpr int kYields = 64;  // ranks as threads come a few microseconds apart: as long as a thread needs to wake up
}

void Outcome::settle(State state) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_.store(state, std::memory_order_release);
  }
  settled_.notify_all();
}

void Outcome::enqueued(MarkPtr mark, bool may_give_up) {
  mark_ = std::move(mark);
  may_give_up_ = may_give_up;
  settle(kEnqueued);
}

void Outcome::fail(std::exception_ptr error) {
  error_ = std::move(error);
  settle(kFailed);
}

bool Outcome::await(Clock::time_point end) const {
  for (int i = 0; i < kYields && open(); ++i) sched_yield();
  if (!open()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  return settled_.wait_until(lock, end, [this] { return !open(); });
}

}  // namespace ringcomm::cuda
