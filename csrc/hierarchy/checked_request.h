// Requests of the engine over several hosts. The engine may know more about the end of a call than the request does.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>

#include "core/engine.h"

namespace ringcomm::hierarchy {

class CheckedRequest final : public Request, public std::enable_shared_from_this<CheckedRequest> {
 public:
  // `check` gets the request's error, or null if there is none so far. It may be called several times, by several
  // threads, and may throw another error to be reported instead.
  CheckedRequest(std::shared_ptr<Request> request, std::function<void(const std::exception_ptr&)> check)
      : request_(std::move(request)), check_(std::move(check)) {}

  bool done() const override { return request_->done(); }
  void wait(std::int64_t timeout_ms) override {
    explained([&] { request_->wait(timeout_ms); });
    conclude();
  }
  void on_done(std::function<void(std::exception_ptr)> callback) override {
    request_->on_done([self = shared_from_this(), callback = std::move(callback)](std::exception_ptr error) {
      try {
        if (error)
          self->check_(error);
        else
          self->conclude();
      } catch (...) {
        error = std::current_exception();
      }
      callback(error);
    });
  }
  int source() const override { return request_->source(); }
  void start_now() override { request_->start_now(); }
  void join(std::uintptr_t stream) override {
    if (!ended_well_.load()) check_(nullptr);
    explained([&] { request_->join(stream); });
  }

 private:
  template <typename Act>
  void explained(const Act& act) const {
    try {
      act();
    } catch (const std::exception&) {
      check_(std::current_exception());
      throw;
    }
  }
  void conclude() {
    if (!ended_well_.load()) check_(nullptr);
    ended_well_.store(true);  // checked once; later failures are not those of this call
  }

  const std::shared_ptr<Request> request_;
  const std::function<void(const std::exception_ptr&)> check_;
  std::atomic<bool> ended_well_{false};
};

}  // namespace ringcomm::hierarchy
