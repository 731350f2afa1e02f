// Asynchronous calls of devices over several hosts.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>

#include "core/engine.h"

namespace ringcomm::hierarchy {

// A device's call is over once its last transfer is; `verify` asks the host's engine whether this host's ranks did
// their part.
class VerifiedRequest final : public Request, public std::enable_shared_from_this<VerifiedRequest> {
 public:
  VerifiedRequest(std::shared_ptr<Request> request, std::function<void()> verify)
      : request_(std::move(request)), verify_(std::move(verify)) {}

  bool done() const override { return request_->done(); }
  void wait(std::int64_t timeout_ms) override {
    request_->wait(timeout_ms);
    conclude();
  }
  void on_done(std::function<void(std::exception_ptr)> callback) override {
    request_->on_done([self = shared_from_this(), callback = std::move(callback)](std::exception_ptr error) {
      try {
        if (!error) self->conclude();
      } catch (...) {
        error = std::current_exception();
      }
      callback(error);
    });
  }
  int source() const override { return request_->source(); }
  void start_now() override { request_->start_now(); }
  void join(std::uintptr_t stream) override {
    if (!ended_well_.load()) verify_();
    request_->join(stream);
  }

 private:
  void conclude() {
    if (!ended_well_.load()) verify_();
    ended_well_.store(true);  // checked once; later failures are not those of this call
  }

  const std::shared_ptr<Request> request_;
  const std::function<void()> verify_;
  std::atomic<bool> ended_well_{false};
};

}  // namespace ringcomm::hierarchy
