// Failures as sentences: the record that a kernel leaves in the host page, and the first reason for which a
// communicator has ended.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "core/call/signature.h"
#include "core/engine.h"
#include "core/error.h"
#include "cuda/device/args.h"

namespace ringcomm::cuda {

// "2 s", "0.25 s"
std::string seconds(std::int64_t timeout_ms);

// The error that `status` stands for. `calls` names the calls that this rank was in: "all_reduce", or several.
Error explain(const Status& status, int rank, const std::string& calls, std::int64_t timeout_ms);

// The end of a communicator, as far as this process knows. The first reason is kept.
class AbortState {
 public:
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // Returns false if there was a reason already.
  bool record(const std::string& reason, ErrorCode code);
  std::string why() const;
  ErrorCode code() const;
  // Throws if the communicator has ended.
  void check(Op op, int rank) const {
    if (ended()) raise(op, rank);
  }
  [[noreturn]] void raise(Op op, int rank) const;

 private:
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;
  std::string reason_;
  ErrorCode code_ = ErrorCode::kAborted;
};

}  // namespace ringcomm::cuda
