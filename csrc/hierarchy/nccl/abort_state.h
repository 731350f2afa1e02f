// The end of a transport: an abort, or the first failure that no call was there to throw.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>

#include "hierarchy/transport.h"

namespace ringcomm::nccl {

class AbortState {
 public:
  // Ends the transport. Returns false if it had ended before.
  bool end() { return !ended_.exchange(true); }
  bool ended() const { return ended_.load(); }
  // Whether the transport has ended or failed, so that waiting is useless.
  bool is_over() const { return ended() || failed_.load(); }

  // Keeps the first failure, and passes it to the handler.
  void fail(const TransportFailure& failure) {
    std::function<void(const TransportFailure&)> handler;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (failure_ || ended()) return;
      failure_ = failure;
      failed_.store(true);
      handler.swap(handler_);
    }
    if (handler) handler(failure);
  }
  void on_failure(std::function<void(const TransportFailure&)> handler) {
    std::optional<TransportFailure> failure;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      failure = failure_;
      if (!failure) handler_ = std::move(handler);
    }
    if (failure && handler) handler(*failure);
  }
  std::optional<TransportFailure> failure() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 private:
  std::atomic<bool> ended_{false}, failed_{false};
  mutable std::mutex mutex_;
  std::function<void(const TransportFailure&)> handler_;
  std::optional<TransportFailure> failure_;
};

}  // namespace ringcomm::nccl
