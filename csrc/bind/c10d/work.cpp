#include "bind/c10d/work.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "bind/error_class.h"

namespace ringcomm {
namespace {

// Completes futures that Python holds, which runs their callbacks. These may wait for later calls, so the engine's own
// thread must not run them; and a callback that waits must not delay the next, so a thread is started whenever none is
// free. (PowerSGD's hook does both.) Beyond `kAtOnce` threads, which may all wait for the GIL only, another one is
// started if no callback has begun for `kStalled`.
class CallbackThreads {
 public:
  // A forked child has none of the parent's threads, and begins anew.
  static CallbackThreads& instance() {
    static std::atomic<CallbackThreads*> current{new CallbackThreads};  // never destroyed
    CallbackThreads* threads = current.load();
    while (threads->pid_ != getpid()) {
      auto fresh = std::make_unique<CallbackThreads>();
      if (current.compare_exchange_strong(threads, fresh.get())) threads = fresh.release();
    }
    return *threads;
  }

  void post(std::function<void()> task) {
    std::unique_lock<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (idle_ < tasks_.size()) {
      if (num_threads_ < kAtOnce) {
        start();
      } else if (!std::exchange(watched_, true)) {
        watched_ = run_in_thread([this] { watch(); });
      }
    }
    if (num_threads_ == 0) return run_first(lock);  // the system has no thread left
    changed_.notify_one();
  }

 private:
  static constexpr std::size_t kAtOnce = 16;
  static constexpr std::chrono::milliseconds kStalled{100};

  static bool run_in_thread(std::function<void()> body) {
    try {
      std::thread(std::move(body)).detach();
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  void start() {
    if (run_in_thread([this] { serve(); })) ++num_threads_;
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      const bool found = changed_.wait_for(lock, std::chrono::seconds(1), [this] { return !tasks_.empty(); });
      --idle_;
      if (!found) break;
      run_first(lock);
      lock.lock();
    }
    --num_threads_;
  }

  void watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!tasks_.empty()) {
      const std::uint64_t before = num_begun_;
      lock.unlock();
      std::this_thread::sleep_for(kStalled);
      lock.lock();
      if (!tasks_.empty() && num_begun_ == before) start();
    }
    watched_ = false;
  }

  // Runs the first task, and leaves the lock open.
  void run_first(std::unique_lock<std::mutex>& lock) {
    const auto task = std::move(tasks_.front());
    tasks_.pop_front();
    ++num_begun_;
    lock.unlock();
    task();
  }

  const pid_t pid_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::size_t idle_ = 0, num_threads_ = 0;
  std::uint64_t num_begun_ = 0;
  bool watched_ = false;
};

// When torch itself rethrows an error from a future (in DDP's reducer or autograd), only errors derived from torch's
// keep their Python class.
struct PythonError final : torch::PyTorchError {
  explicit PythonError(const Error& error)
      : PyTorchError(advice_to_groups(error.what())), name(error_class(error.code())) {}
  PyObject* python_type() override {  // called with the GIL; the module keeps the class alive
    return pybind11::module_::import("ringcomm.backend").attr(name).ptr();
  }
  const char* const name;
};

std::exception_ptr as_torchs(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& each) {
    return std::make_exception_ptr(PythonError(each));
  } catch (...) {
    return error;
  }
}

}  // namespace

void AsyncWork::add(Engine& engine, Task&& task, at::TensorList outputs) {
  outputs_.insert(outputs_.end(), outputs.begin(), outputs.end());
  for (Tensors* tensors : {&task.keep, &task.copies})
    std::move(tensors->begin(), tensors->end(), std::back_inserter(keep_));
  std::move(task.pairs.begin(), task.pairs.end(), std::back_inserter(pairs_));
  requests_.push_back(engine.submit(std::move(task.call)));
  pending_.fetch_add(1, std::memory_order_relaxed);
  // Released here, reclaimed by the callback: with a raw pointer the callback does not allocate memory.
  AsyncWork* self = c10::intrusive_ptr<AsyncWork>::reclaim_copy(this).release();
  requests_.back()->on_done(
      [self](std::exception_ptr error) { c10::intrusive_ptr<AsyncWork>::reclaim(self)->settle(std::move(error)); });
}

void AsyncWork::settle(std::exception_ptr error) {
  if (error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) end();
}

void AsyncWork::end() {
  if (!error_ && !pairs_.empty()) {
    try {
      write_back(pairs_);
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  pairs_.clear();
  keep_.clear();
  finish(error_);
  if (!claim_future()) return;
  if (!python_future_) return complete_future();
  auto self = c10::intrusive_ptr<AsyncWork>::reclaim_copy(this);
  CallbackThreads::instance().post([self = std::move(self)] { self->complete_future(); });
}

// Whether the caller must complete the future.
bool AsyncWork::claim_future() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && future_ && !std::exchange(future_claimed_, true);
}

void AsyncWork::complete_future() {
  if (error_) {
    future_->setError(as_torchs(error_));
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> AsyncWork::getFuture() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    python_future_ |= PyGILState_Check() != 0;
  }
  if (claim_future()) complete_future();
  return future_;
}

bool AsyncWork::wait(std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const std::int64_t limit = engine_timeout(timeout);
  const auto deadline = Clock::now() + std::chrono::milliseconds(limit);
  if (!isCompleted()) {
    for (const auto& request : requests_) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      request->wait(limit == 0 ? 0 : std::max<std::int64_t>(left, 1));
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);  // a request's callback may end slightly after the request
  cv_.wait(lock, [this] { return completed_; });
  const auto future = future_;
  lock.unlock();
  if (future) future->wait();  // the future is complete once the call is
  if (error_) std::rethrow_exception(error_);
  return true;
}

int AsyncWork::sourceRank() const { return requests_.empty() ? -1 : requests_.front()->source(); }

Tensors AsyncWork::result() { return outputs_; }

}  // namespace ringcomm
