// Asynchronous calls in flight, and the thread that reports their end.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "core/engine.h"
#include "cuda/launch/context.h"
#include "cuda/streams/pending_call.h"

namespace ringcomm::cuda {

class Watcher;

// A request whose end is an event on the device.
class DeviceRequest final : public Request, public std::enable_shared_from_this<DeviceRequest> {
 public:
  DeviceRequest(std::shared_ptr<Context> context, std::shared_ptr<Watcher> watcher,
                std::shared_ptr<PendingCall> pending, Op op, std::int64_t limit_ms);

  bool done() const override;
  void wait(std::int64_t timeout_ms) override;
  void on_done(std::function<void(std::exception_ptr)> callback) override;
  int source() const override { return pending_->source(); }
  void join(std::uintptr_t stream) override;

  // For the watcher: whether the request is over; it is also over once the limit has passed.
  bool poll();
  // Valid once the request is over.
  std::exception_ptr result();

 private:
  void conclude();

  const std::shared_ptr<Context> context_;
  const std::shared_ptr<Watcher> watcher_;
  const std::shared_ptr<PendingCall> pending_;
  const Op op_;
  const std::int64_t limit_ms_;
  const Clock::time_point limit_;        // for all ranks of this process to call
  std::atomic<bool> ended_well_{false};  // seen once; a later failure is not this call's
};

// Watches the requests that have a callback.
class Watcher {
 public:
  Watcher(int device, int rank) : device_(device), rank_(rank) {}
  ~Watcher() { stop(); }

  void watch(std::shared_ptr<DeviceRequest> request, std::function<void(std::exception_ptr)> callback);
  // Ends the thread once all requests that it watches are over.
  void stop();
  bool runs_this_thread() const { return id_.load() == std::this_thread::get_id(); }

 private:
  using Item = std::pair<std::shared_ptr<DeviceRequest>, std::function<void(std::exception_ptr)>>;
  void run();
  void loop();
  // Calls the callbacks of requests that are over, without the lock. Returns whether there were any.
  bool sweep(std::unique_lock<std::mutex>& lock);

  const int device_, rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  std::thread thread_;
  std::atomic<std::thread::id> id_{};
  bool stopping_ = false;
};

}  // namespace ringcomm::cuda
