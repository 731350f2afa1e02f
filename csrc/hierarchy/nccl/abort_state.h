// The end of a wire: an abort, or the first failure that no call was there to throw.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>

#include "hierarchy/transport.h"

namespace ringcomm::nccl {

class AbortState {
 public:
  // Ends the wire. Returns false if it had ended before.
  bool end() { return !ended_.exchange(true); }
  bool ended() const { return ended_.load(); }
  // Whether the wire has ended or failed, so that waiting is useless.
  bool is_over() const { return ended() || failed_.load(); }

  // Keeps the first failure, and passes it to the handler.
  void fail(const WireFailure& failure) {
    std::function<void(const WireFailure&)> handler;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure_ || ended()) return;
      failure_ = failure;
      failed_.store(true);
      handler.swap(handler_);
    }
    if (handler) handler(failure);
  }
  void on_failure(std::function<void(const WireFailure&)> handler) {
    std::optional<WireFailure> failure;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      failure = failure_;
      if (!failure) handler_ = std::move(handler);
    }
    if (failure && handler) handler(*failure);
  }
  std::optional<WireFailure> failure() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 private:
  std::atomic<bool> ended_{false}, failed_{false};
  mutable std::mutex mutex_;
  std::function<void(const WireFailure&)> handler_;
  std::optional<WireFailure> failure_;
};

}  // namespace ringcomm::nccl
